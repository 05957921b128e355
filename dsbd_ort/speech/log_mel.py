"""Log-mel features of audio, as Whisper's feature extractor computes them, in numpy.

A frame is ``n_fft`` samples around every ``hop_length``-th sample. Its power spectrum is weighted
by triangular filters, evenly spaced on Slaney's mel scale. The log10 of the result is clipped at 8
below the maximum of the whole audio, and scaled to about -1 to 1.

Frames are computed in blocks, so that memory in addition to samples and features does not grow with
the audio. The features of long audio need not be in memory either: ``LogMel.windows``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.speech_entry import SpeechEntry

Samples = NDArray[np.float32]
Floats = NDArray[np.float64]

_BLOCK = 3000  # frames computed at a time: 30 s, about 20 MB
_RANGE = 8.0  # decades below the maximum that are kept
_FLOOR = 1e-10  # of a power, before its logarithm
_MAX_HERTZ = 8000.0
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0  # up to here Slaney's scale is linear, then logarithmic
_MELS_PER_LOG = 27.0 / np.log(6.4)


@functools.cache
def mel_filters(num_mels: int, n_fft: int, sampling_rate: int) -> Floats:
    """Return weights of frequencies, triangles of area 1, (n_fft // 2 + 1, num_mels) float64."""
    lowest, highest = _mels(np.array([0.0, _MAX_HERTZ]))
    edges = _hertz(np.linspace(lowest, highest, num_mels + 2))
    frequencies = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)
    from_edges = edges[None] - frequencies[:, None]
    widths = np.diff(edges)
    rising = -from_edges[:, :-2] / widths[:-1]
    falling = from_edges[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    filters.flags.writeable = False  # shared
    return filters


def _mels(hertz: Floats) -> Floats:
    linear = hertz * _LINEAR_MELS / _LINEAR_HERTZ
    above = np.log(np.maximum(hertz, _LINEAR_HERTZ) / _LINEAR_HERTZ) * _MELS_PER_LOG
    return np.where(hertz >= _LINEAR_HERTZ, _LINEAR_MELS + above, linear)


def _hertz(mels: Floats) -> Floats:
    linear = mels * _LINEAR_HERTZ / _LINEAR_MELS
    above = _LINEAR_HERTZ * np.exp((mels - _LINEAR_MELS) / _MELS_PER_LOG)
    return np.where(mels >= _LINEAR_MELS, above, linear)


class LogMel:
    """Computes the features of audio by the settings of a model."""

    def __init__(self, settings: SpeechEntry) -> None:
        self._hop = settings.hop_length
        self._n_fft = settings.n_fft
        self._num_mels = settings.num_mels
        self._chunk = settings.chunk_seconds * settings.sampling_rate
        self._filters = mel_filters(settings.num_mels, settings.n_fft, settings.sampling_rate)
        # periodic, as of a spectrum; np.hanning is symmetric
        phase = 2 * np.pi * np.arange(settings.n_fft) / settings.n_fft
        self._window = 0.5 - 0.5 * np.cos(phase)

    def __call__(self, samples: Samples) -> Samples:
        """Return the features of an audio, (num_mels, frames) float32.

        samples: (n,) float32; frames are n divided by the hop length. Audio shorter than a chunk is
            padded to it with zeros. InputError: the samples are invalid.
        """
        padded = self._padded(samples)
        features = np.empty((self._num_mels, len(padded) // self._hop), np.float32)
        for first, block in self._blocks(padded):
            features[:, first : first + block.shape[1]] = block
        return _scaled(features, float(features.max()))

    def windows(self, samples: Samples) -> FeatureWindows:
        """Return the features as windows, which are computed when read; raises as a call."""
        padded = self._padded(samples)
        if len(padded) == self._chunk:
            features = self(padded)
            return FeatureWindows(features.shape[1], lambda first, last: features[:, first:last])
        maximum = max(float(np.float32(block.max())) for _, block in self._blocks(padded))

        def computed(first: int, last: int) -> Samples:
            return _scaled(self._log_powers(padded, first, last).astype(np.float32), maximum)

        return FeatureWindows(len(padded) // self._hop, computed)

    def _padded(self, samples: Samples) -> Samples:
        checked = np.asarray(samples)
        if checked.ndim != 1 or checked.dtype != np.float32 or not len(checked):
            raise InputError(
                f"the samples are {checked.dtype} of shape {checked.shape}; expected float32 of "
                "one dimension, at least one sample: mono audio from -1 to 1"
            )
        missing = self._chunk - len(checked)
        return np.pad(checked, (0, missing)) if missing > 0 else checked

    def _blocks(self, padded: Samples) -> Iterator[tuple[int, Floats]]:
        num_frames = len(padded) // self._hop
        for first in range(0, num_frames, _BLOCK):
            yield first, self._log_powers(padded, first, min(first + _BLOCK, num_frames))

    def _log_powers(self, padded: Samples, first: int, last: int) -> Floats:
        """Return log10 of the filtered powers, (num_mels, last - first) float64."""
        half = self._n_fft // 2
        part = _reflected(padded, first * self._hop - half, (last - 1) * self._hop + half)
        frames = np.lib.stride_tricks.sliding_window_view(part, self._n_fft)[:: self._hop]
        spectrum = np.fft.rfft(frames * self._window, axis=1)
        powers = spectrum.real**2 + spectrum.imag**2
        logs: Floats = np.log10(np.maximum(powers @ self._filters, _FLOOR)).T
        return logs


def _reflected(samples: Samples, begin: int, end: int) -> Floats:
    """Return samples ``begin`` to ``end - 1``, (end - begin,); those outside are reflections."""
    num_samples = len(samples)
    parts = [samples[max(begin, 0) : end]]
    if begin < 0:
        parts.insert(0, samples[1 : 1 - begin][::-1])
    if end > num_samples:
        parts.append(samples[2 * num_samples - 1 - end : num_samples - 1][::-1])
    return np.concatenate(parts, dtype=np.float64)


def _scaled(logs: Samples, maximum: float) -> Samples:
    """Scale logarithms in place, cut below the maximum of the whole audio; return them."""
    np.maximum(logs, np.float32(maximum - _RANGE), out=logs)
    logs += np.float32(4.0)
    logs /= np.float32(4.0)
    return logs


class FeatureWindows:
    """Features of an audio, ``num_frames`` of them, by windows that begin anywhere."""

    def __init__(self, num_frames: int, computed: Callable[[int, int], Samples]) -> None:
        """``computed(first, last)`` returns frames, (num_mels, last - first) float32."""
        self.num_frames = num_frames
        self._computed = computed

    def window(self, first: int, length: int) -> Samples:
        """Return the features of frames ``first`` on, (num_mels, length) float32.

        After the last frame they are zeros, as in the training of the model. A frame outside of the
        audio is an InputError.
        """
        if not 0 <= first < self.num_frames:
            raise InputError(f"frame {first}: the audio has frames 0 to {self.num_frames - 1}")
        last = min(first + length, self.num_frames)
        features = self._computed(first, last)
        return np.pad(features, ((0, 0), (0, length - (last - first))))
