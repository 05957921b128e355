"""Front ends of sounds in prompts: turn the samples of a sound into rows of the prompt."""

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

    max_samples: samples of the longest sound; None: no such limit.
    """

    part_type, noun = "audio", "sound"
    shorten = "give shorter sounds, or fewer; transcribe, or --audio, cuts long ones"
    max_samples: int | None = None

    def __init__(
        self,
        entry: ChunkedSound | StackedSound | WindowedSound,
        placeholder: str,
        form: MelForm,
        unit_frames: int,
    ) -> None:
        """``unit_frames``: number of frames that become a fixed number of rows."""
        self.entry = entry
        self._placeholder, self._mel = placeholder, LogMel(form)
        self._unit = unit_frames * entry.hop_length

    def read(self, content: Audio, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """See MediumFrontEnd."""
        rate = self.entry.sampling_rate
        seconds = max(most_rows, 1) * self._unit / self.num_rows(self._unit) / rate
        samples = read_samples(content, rate, max_seconds=min(seconds, limits.max_seconds))
        if self.max_samples is not None and len(samples) > self.max_samples:
            raise InputError(
                f"a sound of {len(samples) / rate:.1f} s is given, this model reads "
                f"{self.max_samples / rate:g} s at most; {self.shorten}"
            )
        num_rows = self.num_rows(len(samples))
        return ReadMedium(
            num_rows=num_rows,
            expansion=self._placeholder * num_rows,
            pieces=lambda: self._pieces(samples),
        )

    def num_rows(self, num_samples: int) -> int:
        """Return the number of rows of a sound in the prompt."""
        return self.entry.num_rows(self._mel.num_frames(num_samples))

    def most_samples(self, num_rows: int, limit: int) -> int:
        """Return the samples of the longest sound with ``num_rows`` rows, at most ``limit``."""
        lengths = range(min(limit, self.max_samples or limit), self._unit, -self._unit)
        return next((each for each in lengths if self.num_rows(each) <= num_rows), self._unit)

    def _pieces(self, samples: Samples) -> list[GivenPiece]:
        return self.entry.pieces(self._mel(samples))


class WindowedFrontEnd(SoundFrontEnd):
    """Front end of models with Whisper's windows; features are computed for each window."""

    entry: WindowedSound

    def __init__(self, entry: WindowedSound, placeholder: str) -> None:
        form = MelForm.of(entry, entry.window_samples)
        super().__init__(entry, placeholder, form, 2 * entry.merged)
        self.max_samples = entry.most_windows * entry.window_samples

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
