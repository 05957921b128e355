"""Weights as integers and scales, in numpy: by output channel, or by block of 32 inputs.

Every function works through a weight in pieces, so that besides the result only a piece is in
memory in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
_CHUNK_ELEMENTS = 4 * 2**20
_ZERO_POINT = 128  # of 8 bits, which are symmetric


@dataclass(frozen=True)
class Blocks:
    """How the blocks of a weight (out, in) are scaled: value = (integer - zero_point) * scale.

    Attributes:
        scales: (out, in / 32 rounded up) float32.
        zero_points: the same shape, uint8.
    """

    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]


def channel_scales(weight: NDArray[Any], in_axis: int) -> NDArray[np.float32]:
    """Return the largest magnitude along ``in_axis`` over 127, that axis kept with size 1.

    [[1, -254], [127, 2]] along axis 1 gives [[2], [1]].
    """
    largest = np.maximum(
        weight.max(in_axis, keepdims=True), -weight.min(in_axis, keepdims=True)
    ).astype(np.float32)
    return np.where(largest > 0, largest / np.float32(127), np.float32(1))


def channel_integers(weight: NDArray[Any], in_axis: int) -> NDArray[np.int8]:
    """Return the weight divided by its ``channel_scales`` and rounded, int8 of the same shape."""
    scales = np.broadcast_to(channel_scales(weight, in_axis), weight.shape)
    integers = np.empty(weight.shape, np.int8)
    for rows in _chunks(weight.shape):
        integers[rows] = np.rint(weight[rows] / scales[rows])
    return integers


def blocks_of(weight: NDArray[Any], bits: int) -> Blocks:
    """Return scales and zero points of a weight (out, in).

    8 bits are symmetric around 128. 4 bits span the smallest and largest value of the block and
    always zero: with so few steps a step that is never used costs more than the zero points.
    """
    num_blocks = -(-weight.shape[1] // BLOCK_SIZE)
    scales = np.empty((weight.shape[0], num_blocks), np.float32)
    zero_points = np.full(scales.shape, _ZERO_POINT, np.uint8)
    for rows in _chunks(weight.shape):
        blocks = _blocked(weight[rows])
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        span = np.maximum(high, -low) / 127 if bits == 8 else (high - low) / 15
        scales[rows] = np.where(span > 0, span, 1)
        if bits == 4:
            zero_points[rows] = np.rint(-low / scales[rows])
    return Blocks(scales, zero_points)


def block_integers(weight: NDArray[Any], blocks: Blocks, bits: int) -> NDArray[np.uint8]:
    """Return the integers of a weight (out, in): (out, in / 32 rounded up, 32 * bits / 8) uint8.

    Two of 4 bits share a byte, the first in the lower half: 3 and 5 give 0x53. A last block that
    is not full is filled with zeros.
    """
    integers = np.empty((*blocks.scales.shape, BLOCK_SIZE * bits // 8), np.uint8)
    for rows in _chunks(weight.shape):
        scaled = np.rint(_blocked(weight[rows]) / blocks.scales[rows, :, None])
        piece = np.clip(scaled + blocks.zero_points[rows, :, None], 0, 2**bits - 1).astype(np.uint8)
        integers[rows] = pack_nibbles(piece) if bits == 4 else piece
    return integers


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return (..., n) numbers below 16 as (..., n / 2 rounded up) bytes, the first number lower."""
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    return np.asarray(values[..., 0::2] | (values[..., 1::2] << 4), np.uint8)


def _blocked(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Return rows (n, in) as (n, blocks, 32) float32, filled up with zeros."""
    padding = -rows.shape[1] % BLOCK_SIZE
    full = np.pad(rows.astype(np.float32), [(0, 0), (0, padding)])
    return full.reshape(rows.shape[0], -1, BLOCK_SIZE)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of the first axis that hold about ``_CHUNK_ELEMENTS`` each."""
    num_rows = max(1, _CHUNK_ELEMENTS * shape[0] // max(1, int(np.prod(shape))))
    return (slice(start, start + num_rows) for start in range(0, shape[0], num_rows))
