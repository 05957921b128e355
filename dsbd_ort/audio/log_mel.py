"""Log-mel features of audio, as the feature extractors of speech models compute them, in numpy.

A frame is ``n_fft`` samples around every ``hop_length``-th sample. Its power spectrum is weighted
by triangular filters, evenly spaced on a mel scale. The log10 of the result is clipped at 8 below
the maximum of the whole audio, and scaled to about -1 to 1.

Frames are computed in blocks, so that only the samples and features take memory that grows with the
audio. With ``LogMel.windows`` the features of long audio need not be in memory either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import InputError
from dsbd_runtime.media.given_sound import GivenSound
from dsbd_runtime.parts.source.speech_entry import SpeechEntry

Samples = NDArray[np.float32]
Floats = NDArray[np.float64]

_BLOCK = 3000  # frames computed at a time: 30 s, about 20 MB
_RANGE = 8.0  # decades below the maximum that are kept
_FLOOR = 1e-10  # least power, before the logarithm
_MAX_HERTZ = 8000.0
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0  # Slaney's scale is linear below, logarithmic above
_MELS_PER_LOG = 27.0 / np.log(6.4)


@dataclass(frozen=True, kw_only=True)
class MelForm:
    """Settings of the features of a model.

    Attributes:
        window_length: samples of the Hann window, which is in the middle of a frame.
        least_samples: shorter audio is padded with zeros to this length.
        is_htk: True: HTK's mel scale and triangles of height 1. False: Slaney's scale and triangles
            of area 1.
        keeps_last: whether the frame after the last whole hop is kept.
    """

    num_mels: int
    n_fft: int
    window_length: int
    hop_length: int
    sampling_rate: int
    least_samples: int
    is_htk: bool = False
    keeps_last: bool = False

    @classmethod
    def of(cls, sound: SpeechEntry | GivenSound, least_samples: int) -> MelForm:
        """Return Whisper's form with the sizes of a manifest's entry; a window fills its frame."""
        return cls(
            num_mels=sound.num_mels,
            n_fft=sound.n_fft,
            window_length=sound.n_fft,
            hop_length=sound.hop_length,
            sampling_rate=sound.sampling_rate,
            least_samples=least_samples,
        )

    @classmethod
    def of_windows(cls, speech: SpeechEntry) -> MelForm:
        """Return Whisper's form; audio shorter than 30 s (``chunk_seconds``) is padded to it."""
        return cls.of(speech, speech.chunk_seconds * speech.sampling_rate)


@functools.cache
def mel_filters(num_mels: int, n_fft: int, sampling_rate: int, *, is_htk: bool = False) -> Floats:
    """Return the weights of the frequencies, (n_fft // 2 + 1, num_mels) float64."""
    mels, hertz = (_htk_mels, _htk_hertz) if is_htk else (_mels, _hertz)
    lowest, highest = mels(np.array([0.0, _MAX_HERTZ]))
    edges = hertz(np.linspace(lowest, highest, num_mels + 2))
    frequencies = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)
    from_edges = edges[None] - frequencies[:, None]
    widths = np.diff(edges)
    rising = -from_edges[:, :-2] / widths[:-1]
    falling = from_edges[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    if not is_htk:
        filters *= 2.0 / (edges[2:] - edges[:-2])
    filters.flags.writeable = False  # shared
    return filters


def _htk_mels(hertz: Floats) -> Floats:
    return np.asarray(2595.0 * np.log10(1.0 + hertz / 700.0))


def _htk_hertz(mels: Floats) -> Floats:
    return np.asarray(700.0 * (10.0 ** (mels / 2595.0) - 1.0))


def _mels(hertz: Floats) -> Floats:
    linear = hertz * _LINEAR_MELS / _LINEAR_HERTZ
    above = np.log(np.maximum(hertz, _LINEAR_HERTZ) / _LINEAR_HERTZ) * _MELS_PER_LOG
    return np.where(hertz >= _LINEAR_HERTZ, _LINEAR_MELS + above, linear)


def _hertz(mels: Floats) -> Floats:
    linear = mels * _LINEAR_HERTZ / _LINEAR_MELS
    above = _LINEAR_HERTZ * np.exp((mels - _LINEAR_MELS) / _MELS_PER_LOG)
    return np.where(mels >= _LINEAR_MELS, above, linear)


class LogMel:
    """Computes the features of audio with the settings of a model."""

    def __init__(self, form: MelForm) -> None:
        self._form = form
        self._hop, self._n_fft = form.hop_length, form.n_fft
        self._least = max(form.least_samples, form.n_fft)  # reflections need n_fft samples
        self._filters = mel_filters(
            form.num_mels, form.n_fft, form.sampling_rate, is_htk=form.is_htk
        )
        phase = 2 * np.pi * np.arange(form.window_length) / form.window_length
        around = form.n_fft - form.window_length
        self._window = np.pad(0.5 - 0.5 * np.cos(phase), (around // 2, around - around // 2))

    def __call__(self, samples: Samples) -> Samples:
        """Return the features of an audio, (num_mels, frames) float32.

        samples: (n,) float32. The number of frames is n divided by the hop length. Audio with fewer
            than ``least_samples`` is padded with zeros. InputError: the samples are invalid.
        """
        padded = self._padded(samples)
        features = np.empty((self._form.num_mels, self.num_frames(len(padded))), np.float32)
        for first, block in self._blocks(padded):
            features[:, first : first + block.shape[1]] = block
        return _scaled(features, float(features.max()))

    def windows(self, samples: Samples) -> FeatureWindows:
        """Return the features as windows, which are computed when read; errors as ``__call__``."""
        padded = self._padded(samples)
        if len(padded) == self._least:
            features = self(samples)
            return FeatureWindows(features.shape[1], lambda first, last: features[:, first:last])
        maximum = max(float(np.float32(block.max())) for _, block in self._blocks(padded))

        def computed(first: int, last: int) -> Samples:
            return _scaled(self._log_powers(padded, first, last).astype(np.float32), maximum)

        return FeatureWindows(self.num_frames(len(padded)), computed)

    def _padded(self, samples: Samples) -> Samples:
        checked = np.asarray(samples)
        if checked.ndim != 1 or checked.dtype != np.float32 or not len(checked):
            raise InputError(
                f"the samples are {checked.dtype} of shape {checked.shape}; expected float32 of "
                "one dimension, at least one sample: mono audio from -1 to 1"
            )
        missing = self._least - len(checked)
        return np.pad(checked, (0, missing)) if missing > 0 else checked

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of an audio with ``num_samples`` samples."""
        return max(num_samples, self._least) // self._hop + self._form.keeps_last

    def _blocks(self, padded: Samples) -> Iterator[tuple[int, Floats]]:
        num_frames = self.num_frames(len(padded))
        for first in range(0, num_frames, _BLOCK):
            yield first, self._log_powers(padded, first, min(first + _BLOCK, num_frames))

    def _log_powers(self, padded: Samples, first: int, last: int) -> Floats:
        """Return logarithms of the filtered powers, (num_mels, last - first) float64."""
        half = self._n_fft // 2
        begin, end = first * self._hop - half, (last - 1) * self._hop + half
        part = _reflected(padded, begin, end)
        frames = np.lib.stride_tricks.sliding_window_view(part, self._n_fft)[:: self._hop]
        spectrum = np.fft.rfft(frames * self._window, axis=1)
        powers = spectrum.real**2 + spectrum.imag**2
        return np.asarray(np.log10(np.maximum((powers @ self._filters).T, _FLOOR)))


def _reflected(samples: Samples, begin: int, end: int) -> Floats:
    """Return samples ``begin`` to ``end - 1``, (end - begin,); beyond the audio, reflections."""
    num_samples = len(samples)
    parts = [samples[max(begin, 0) : end]]
    if begin < 0:
        parts.insert(0, samples[1 : 1 - begin][::-1])
    if end > num_samples:
        parts.append(samples[2 * num_samples - 1 - end : num_samples - 1][::-1])
    return np.concatenate(parts, dtype=np.float64)


def _scaled(logs: Samples, maximum: float) -> Samples:
    """Clip logarithms at 8 below the audio's maximum, scale them in place, and return them."""
    np.maximum(logs, np.float32(maximum - _RANGE), out=logs)
    logs += np.float32(4.0)
    logs /= np.float32(4.0)
    return logs


class FeatureWindows:
    """Features of an audio with ``num_frames`` frames, read as windows that may begin anywhere."""

    def __init__(self, num_frames: int, computed: Callable[[int, int], Samples]) -> None:
        """``computed(first, last)`` returns frames, (num_mels, last - first) float32."""
        self.num_frames = num_frames
        self._computed = computed

    def window(self, first: int, length: int) -> Samples:
        """Return the features of ``length`` frames from ``first`` on, (num_mels, length) float32.

        After the last frame of the audio they are zeros, as in the training of the model.
        InputError: ``first`` is outside of the audio.
        """
        if not 0 <= first < self.num_frames:
            raise InputError(f"frame {first}: the audio has frames 0 to {self.num_frames - 1}")
        last = min(first + length, self.num_frames)
        features = self._computed(first, last)
        return np.pad(features, ((0, 0), (0, length - (last - first))))
