"""eSpeak NG: texts to WAV files, with the library from the package espeakng-loader."""

import ctypes
import json
import sys
import wave
from typing import Any

import espeakng_loader

_SYNCHRONOUS, _UTF8, _RATE = 2, 1, 1  # constants of espeak-ng/speak_lib.h
_HEARD = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Speaker:
    """The library; only one instance per process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        folder = espeakng_loader.get_data_path().encode()
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, folder, 0)
        if self._rate <= 0:
            raise OSError(f"eSpeak NG does not start with the data in {folder.decode()}")
        self._samples = bytearray()
        self._callback = _HEARD(self._hear)  # kept alive while the library may call it
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, samples: Any, number: int, _: int | None) -> int:
        if samples and number > 0:
            self._samples += ctypes.string_at(samples, 2 * number)
        return 0

    def write(self, text: str, voice: str, words_per_minute: int, path: str) -> None:
        """Write a text, read by a voice, to a WAV file.

        Raises:
            ValueError: the library does not have the voice.
        """
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"eSpeak NG has no voice {voice!r}")
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
        self._samples.clear()
        content = text.encode() + b"\0"
        self._library.espeak_Synth(content, len(content), 0, 0, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        with wave.open(path, "wb") as file:
            file.setparams((1, 2, self._rate, 0, "NONE", ""))
            file.writeframes(bytes(self._samples))


def main() -> None:
    """Write a file for each JSON line on stdin: text, voice, words_per_minute, path."""
    speaker = Speaker()
    for line in sys.stdin:
        speaker.write(**json.loads(line))


if __name__ == "__main__":
    main()
