"""Front ends of sounds in prompts: how each kind of entry measures and reads a sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dsbd_ort.medium_front_end import MediaLimits, MediumFrontEnd, ReadMedium
from dsbd_ort.speech.log_mel import FORMS, LogMel, MelForm, Samples
from dsbd_ort.speech.speech_request import Audio, read_samples
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given_medium import MediumEntry
from dsbd_runtime.parts.given_prompt import GivenPiece
from dsbd_runtime.parts.given_sound import ChunkedSound, GivenSound, StackedSound, WindowedSound


class SoundFrontEnd:
    """Front end of sounds of one kind.

    unit: samples that become a fixed number of rows, of which a sound is a multiple nearly.
    most: samples of the longest sound; None: no limit of its own.
    """

    part_type, noun = "audio", "sound"
    shorten = "give shorter sounds, or fewer; transcribe, or --audio, cuts long ones"
    most: int | None = None

    def __init__(self, sound: GivenSound, placeholder: str, unit: int) -> None:
        self.sampling_rate, self.hop_length = sound.sampling_rate, sound.hop_length
        self.recipe = sound.recipe
        self._placeholder, self._unit = placeholder, unit

    def read(self, content: Audio, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """See MediumFrontEnd."""
        samples_of_row = self._unit / self.num_rows(self._unit)
        seconds = max(most_rows, 1) * samples_of_row / self.sampling_rate
        samples = read_samples(
            content, self.sampling_rate, max_seconds=min(seconds, limits.max_seconds)
        )
        if self.most is not None and len(samples) > self.most:
            raise InputError(
                f"a sound of {len(samples) / self.sampling_rate:.1f} s is given, this model reads "
                f"{self.most / self.sampling_rate:g} s at most; {self.shorten}"
            )
        num_rows = self.num_rows(len(samples))
        return ReadMedium(
            num_rows=num_rows,
            expansion=self._placeholder * num_rows,
            pieces=lambda: self._pieces(samples),
        )

    def num_rows(self, num_samples: int) -> int:
        """Return how many rows of the prompt a sound is."""
        raise NotImplementedError

    def most_samples(self, num_rows: int, most: int) -> int:
        """Return the samples of the longest sound of so many rows, ``most`` or fewer."""
        step = self._unit
        lengths = range(min(most, self.most or most), step, -step)
        return next((each for each in lengths if self.num_rows(each) <= num_rows), step)

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        raise NotImplementedError


class ChunkedFrontEnd(SoundFrontEnd):
    """That of Qwen3-ASR."""

    def __init__(self, sound: ChunkedSound, placeholder: str) -> None:
        super().__init__(sound, placeholder, sound.chunk_frames * sound.hop_length)
        self._sound = sound
        self._mel = LogMel(FORMS["qwen3_asr"].sized(sound, sound.least_samples))

    def num_rows(self, num_samples: int) -> int:
        num_samples = max(num_samples, self._sound.least_samples)
        return self._sound.num_rows(num_samples // self.hop_length)

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        return self._sound.pieces(self._mel(samples))


class StackedFrontEnd(SoundFrontEnd):
    """That of Granite Speech."""

    def __init__(self, sound: StackedSound, placeholder: str) -> None:
        super().__init__(sound, placeholder, 2 * sound.window_pairs * sound.hop_length)
        self._sound = sound
        form = FORMS["granite_speech"].sized(sound, 0)
        self._mel = LogMel(replace(form, window_length=sound.window_length))

    def num_rows(self, num_samples: int) -> int:
        num_frames = max(num_samples, self._sound.n_fft) // self.hop_length + 1
        return self._sound.num_rows(num_frames)

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        return self._sound.pieces(self._mel(samples))


class WindowedFrontEnd(SoundFrontEnd):
    """That of models with Whisper's windows, each of which has features of its own."""

    def __init__(self, sound: WindowedSound, placeholder: str) -> None:
        super().__init__(sound, placeholder, 2 * sound.merged * sound.hop_length)
        self._sound = sound
        self.most = sound.most_windows * sound.window_samples
        self._mel = LogMel(MelForm().sized(sound, sound.window_samples))

    def num_rows(self, num_samples: int) -> int:
        return self._sound.num_rows(-(-num_samples // self.hop_length))

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        size = self._sound.window_samples
        windows = [self._mel(samples[at : at + size]) for at in range(0, len(samples), size)]
        num_frames = -(-len(samples) // self.hop_length)
        return self._sound.pieces(np.concatenate(windows, axis=1), num_frames)


SOUND_FRONT_ENDS: dict[type[MediumEntry], Callable[[Any, str], MediumFrontEnd]] = {
    ChunkedSound: ChunkedFrontEnd,
    StackedSound: StackedFrontEnd,
    WindowedSound: WindowedFrontEnd,
}
"""By the kind of the manifest's entry: front ends of it and of the placeholder's spelling."""
