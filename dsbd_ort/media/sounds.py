"""Front ends of sounds in prompts: samples of a sound to rows of the prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dsbd_ort.audio.audio_files import Audio, read_samples
from dsbd_ort.audio.log_mel import LogMel, MelForm, Samples
from dsbd_ort.media.message_parts import MediaLimits, ReadMedium
from dsbd_runtime.errors import InputError
from dsbd_runtime.media.given_sound import ChunkedSound, StackedSound, WindowedSound
from dsbd_runtime.parts.given.given_prompt import GivenPiece


class SoundFrontEnd:
    """Front end of sounds whose features are computed as a whole; see MediumFrontEnd.

    most: samples of the longest sound; None: no limit of its own.
    """

    part_type, noun = "audio", "sound"
    shorten = "give shorter sounds, or fewer; transcribe, or --audio, cuts long ones"
    most: int | None = None

    def __init__(
        self,
        entry: ChunkedSound | StackedSound | WindowedSound,
        placeholder: str,
        form: MelForm,
        unit_frames: int,
    ) -> None:
        """``unit_frames``: become a fixed number of rows; a sound is nearly a multiple of them."""
        self.entry = entry
        self._placeholder, self._mel = placeholder, LogMel(form)
        self._unit = unit_frames * entry.hop_length

    def read(self, content: Audio, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """See MediumFrontEnd."""
        rate = self.entry.sampling_rate
        seconds = max(most_rows, 1) * self._unit / self.num_rows(self._unit) / rate
        samples = read_samples(content, rate, max_seconds=min(seconds, limits.max_seconds))
        if self.most is not None and len(samples) > self.most:
            raise InputError(
                f"a sound of {len(samples) / rate:.1f} s is given, this model reads "
                f"{self.most / rate:g} s at most; {self.shorten}"
            )
        num_rows = self.num_rows(len(samples))
        return ReadMedium(
            num_rows=num_rows,
            expansion=self._placeholder * num_rows,
            pieces=lambda: self._pieces(samples),
        )

    def num_rows(self, num_samples: int) -> int:
        """Return how many rows of the prompt a sound is."""
        return self.entry.num_rows(self._mel.num_frames(num_samples))

    def most_samples(self, num_rows: int, most: int) -> int:
        """Return the samples of the longest sound of so many rows, ``most`` or fewer."""
        lengths = range(min(most, self.most or most), self._unit, -self._unit)
        return next((each for each in lengths if self.num_rows(each) <= num_rows), self._unit)

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        return self.entry.pieces(self._mel(samples))


class WindowedFrontEnd(SoundFrontEnd):
    """Front end of models with Whisper's windows, each of which has features of its own."""

    entry: WindowedSound

    def __init__(self, entry: WindowedSound, placeholder: str) -> None:
        form = MelForm.of(entry, entry.window_samples)
        super().__init__(entry, placeholder, form, 2 * entry.merged)
        self.most = entry.most_windows * entry.window_samples

    def num_rows(self, num_samples: int) -> int:
        return self.entry.num_rows(self._num_frames(num_samples))

    def _num_frames(self, num_samples: int) -> int:
        return -(-num_samples // self.entry.hop_length)

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        size = self.entry.window_samples
        windows = [self._mel(samples[at : at + size]) for at in range(0, len(samples), size)]
        return self.entry.pieces(np.concatenate(windows, axis=1), self._num_frames(len(samples)))


def chunked_front_end(entry: ChunkedSound, placeholder: str) -> SoundFrontEnd:
    """Return the front end of Qwen3-ASR."""
    form = MelForm.of(entry, entry.least_samples)
    return SoundFrontEnd(entry, placeholder, form, entry.chunk_frames)


def stacked_front_end(entry: StackedSound, placeholder: str) -> SoundFrontEnd:
    """Return the front end of Granite Speech."""
    form = MelForm.of(entry, least_samples=0)
    form = replace(form, window_length=entry.window_length, is_htk=True, keeps_last=True)
    return SoundFrontEnd(entry, placeholder, form, 2 * entry.window_pairs)
