"""Samples at another rate: a windowed sinc, evaluated for every phase that outputs can have.

Output n lies at n * step / phases of the input, where step / phases is the ratio of both rates in
lowest terms: at 44.1 kHz one of 16 kHz lies 441 / 160 samples behind the one before, so there are
160 phases, each with its own taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_ZERO_CROSSINGS = 48  # of the sinc on either side: sets the width of the transition
_BETA = 9.0  # of the Kaiser window: what is cut off is 90 dB below
_CUTOFF = 0.94  # of half the lower rate; the transition ends at that half
_BLOCK = 8192  # outputs computed at a time


class Taps(NamedTuple):
    """The filter of every phase.

    Attributes:
        table: (phases, 2 * half) float32. Tap j of an output in phase p weighs the input
            ``half - 1 - j`` samples before the last one that is not behind the output.
        step: outputs of a phase follow each other by so many inputs.
        half: inputs on either side of an output.
    """

    table: Samples
    step: int
    half: int

    @property
    def num_phases(self) -> int:
        """After so many outputs the phases come again."""
        return len(self.table)


def taps_between(from_rate: int, to_rate: int) -> Taps:
    """Return the filter from one sampling rate to another."""
    divisor = math.gcd(from_rate, to_rate)
    num_phases, step = to_rate // divisor, from_rate // divisor
    lower = min(1.0, to_rate / from_rate)  # rates are seen from the input
    half = math.ceil(_ZERO_CROSSINGS / lower)
    offsets = np.arange(1 - half, half + 1) - np.arange(num_phases)[:, None] / num_phases
    window = np.i0(_BETA * np.sqrt(np.maximum(1 - (offsets / half) ** 2, 0))) / np.i0(_BETA)
    table = np.sinc(_CUTOFF * lower * offsets) * window
    table /= table.sum(axis=1, keepdims=True)  # a constant stays what it is
    return Taps(table.astype(np.float32), step, half)


def resampled(blocks: Iterable[Samples], from_rate: int, to_rate: int) -> Iterator[Samples]:
    """Yield the samples of consecutive blocks at another rate, again by blocks.

    Of n samples become n * to_rate / from_rate, rounded up. Before and behind them is silence.
    """
    if from_rate == to_rate:
        yield from blocks
        return
    taps = taps_between(from_rate, to_rate)
    buffer = np.zeros(taps.half - 1, np.float32)  # begins half - 1 inputs before the next output
    dropped = num_inputs = num_done = 0
    for block in blocks:
        num_inputs += len(block)
        buffer = np.concatenate([buffer, block])
        # the last output whose taps all lie in the inputs so far
        end = max(0, (num_inputs - taps.half) * taps.num_phases // taps.step)
        if end > num_done:
            yield from _outputs(buffer, taps, num_done, end, dropped)
            num_done = end
            used = end * taps.step // taps.num_phases - dropped
            buffer, dropped = buffer[used:], dropped + used
    end = -(-num_inputs * taps.num_phases // taps.step)
    if end > num_done:
        padded = np.concatenate([buffer, np.zeros(taps.half, np.float32)])
        yield from _outputs(padded, taps, num_done, end, dropped)


def _outputs(buffer: Samples, taps: Taps, begin: int, end: int, dropped: int) -> Iterator[Samples]:
    """Yield outputs ``begin`` to ``end - 1``; of the padded input ``dropped`` are gone."""
    windows = np.lib.stride_tricks.sliding_window_view(buffer, 2 * taps.half)
    for first in range(begin, end, _BLOCK):
        places = np.arange(first, min(first + _BLOCK, end)) * taps.step
        rows, phases = np.divmod(places, taps.num_phases)
        yield np.einsum("ij,ij->i", windows[rows - dropped], taps.table[phases])
