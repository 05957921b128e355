"""Front ends of sounds in prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsbd_ort.medium_front_end import MediaLimits, MediumFrontEnd, ReadMedium
from dsbd_ort.speech.log_mel import FORMS, LogMel
from dsbd_ort.speech.speech_request import Audio, read_samples
from dsbd_runtime.parts.given_medium import ChunkedSound, MediumEntry


class SoundFrontEnd:
    """The front end of Qwen3-ASR."""

    part_type, noun = "audio", "sound"
    shorten = "give shorter sounds, or fewer; transcribe, or --audio, cuts long ones"

    def __init__(self, sound: ChunkedSound, placeholder: str) -> None:
        self.sampling_rate, self.hop_length = sound.sampling_rate, sound.hop_length
        self._sound, self._placeholder = sound, placeholder
        self._mel = LogMel(FORMS["qwen3_asr"].sized(sound, sound.least_samples))

    def read(self, content: Audio, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """See MediumFrontEnd."""
        sound = self._sound
        frames = max(most_rows, 1) * sound.chunk_frames / sound.num_rows(sound.chunk_frames)
        seconds = min(frames * sound.hop_length / sound.sampling_rate, limits.max_seconds)
        samples = read_samples(content, sound.sampling_rate, max_seconds=seconds)
        num_rows = self.num_rows(len(samples))
        return ReadMedium(
            num_rows=num_rows,
            expansion=self._placeholder * num_rows,
            pieces=lambda: sound.pieces(self._mel(samples)),
        )

    def num_rows(self, num_samples: int) -> int:
        """Return how many rows of the prompt a sound is."""
        num_samples = max(num_samples, self._sound.least_samples)
        return self._sound.num_rows(num_samples // self.hop_length)

    def most_samples(self, num_rows: int, most: int) -> int:
        """Return the samples of the longest sound of so many rows, ``most`` or fewer."""
        step = self._sound.chunk_frames * self.hop_length
        lengths = range(most, step, -step)
        return next((each for each in lengths if self.num_rows(each) <= num_rows), step)


SOUND_FRONT_ENDS: dict[type[MediumEntry], Callable[[Any, str], MediumFrontEnd]] = {
    ChunkedSound: SoundFrontEnd,
}
"""By the kind of the manifest's entry: front ends of it and of the placeholder's spelling."""
