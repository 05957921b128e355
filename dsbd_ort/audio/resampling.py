"""Resampling with a windowed sinc, tabulated for the phases of the outputs.

Output n lies at n * step / phases of the input, where step / phases is the ratio of both rates in
lowest terms: an output of 16 kHz lies 441 / 160 samples of 44.1 kHz after the one before it, so
there are 160 phases, each with its own taps. Pairs of rates with many more phases, such as 44,101
and 16,000 Hz, have a table of only some phases; taps of the others are interpolated.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_ZERO_CROSSINGS = 48  # of the sinc on either side: sets the width of the transition
_BETA = 9.0  # of the Kaiser window: 90 dB of attenuation
_CUTOFF = 0.94  # of half the lower rate; the transition ends at that half
_MOST_PHASES = 1024  # in the table, per sample of the lower rate; interpolation errors are < 1e-6
_BLOCK = 8192  # outputs computed at a time, fewer if they have many taps
_BLOCK_TAPS = 2**22


class Taps(NamedTuple):
    """The filter of every phase.

    table: (num_phases, 2 * half) float32. Let i be the last input that is not after an output in
        phase p. Tap j of the output weighs input i - (half - 1 - j). If there are too many phases,
        (n + 1, 2 * half): row r is for the phase r / n * num_phases.
    num_phases: number of outputs after which the phases repeat.
    step: number of inputs between two outputs of the same phase.
    half: number of inputs on either side of an output.
    """

    table: Samples
    num_phases: int
    step: int
    half: int

    def of(self, phases: NDArray[np.int64]) -> Samples:
        """Return the taps of phases, (len(phases), 2 * half) float32."""
        if len(self.table) == self.num_phases:
            taps: Samples = self.table[phases]
            return taps
        rows, parts = np.divmod(phases * (len(self.table) - 1), self.num_phases)
        shares = (parts / self.num_phases).astype(np.float32)[:, None]
        lower = self.table[rows]
        between: Samples = lower + shares * (self.table[rows + 1] - lower)
        return between


def taps_between(from_rate: int, to_rate: int) -> Taps:
    """Return the filter that converts one sampling rate to another."""
    divisor = math.gcd(from_rate, to_rate)
    num_phases, step = to_rate // divisor, from_rate // divisor
    lower = min(1.0, to_rate / from_rate)  # relative to the input's rate
    half = math.ceil(_ZERO_CROSSINGS / lower)
    max_rows = math.ceil(_MOST_PHASES * lower)
    delays = np.arange(num_phases) / num_phases
    if num_phases > max_rows:
        delays = np.linspace(0, 1, max_rows + 1)
    offsets = np.arange(1 - half, half + 1) - delays[:, None]
    window = np.i0(_BETA * np.sqrt(np.maximum(1 - (offsets / half) ** 2, 0))) / np.i0(_BETA)
    table = np.sinc(_CUTOFF * lower * offsets) * window
    table /= table.sum(axis=1, keepdims=True)  # keeps a constant signal
    return Taps(table.astype(np.float32), num_phases, step, half)


def resampled(blocks: Iterable[Samples], from_rate: int, to_rate: int) -> Iterator[Samples]:
    """Yield the samples of consecutive blocks at another rate, again by blocks.

    n samples become n * to_rate / from_rate samples, rounded up. The input is padded with silence.
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
        # outputs before this one have all their inputs
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
    """Yield outputs ``begin`` to ``end - 1``; ``buffer`` lacks the first ``dropped`` inputs."""
    windows = np.lib.stride_tricks.sliding_window_view(buffer, 2 * taps.half)
    block = min(_BLOCK, _BLOCK_TAPS // (2 * taps.half))
    for first in range(begin, end, block):
        places = np.arange(first, min(first + block, end)) * taps.step
        rows, phases = np.divmod(places, taps.num_phases)
        yield np.einsum("ij,ij->i", windows[rows - dropped], taps.of(phases))
