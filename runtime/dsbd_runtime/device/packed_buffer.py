"""Packed arrays: the small inputs or outputs of one device call, moved by a single copy.

The sizes of a call are rounded up, so the inputs of a forward and of a move have padding rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.devices import ELEMENT_BYTES, Device, DeviceArray
from dsbd_runtime.parts.attention_rows import SRC_ROWS, WRITE_INDICES

_ALIGNMENT = 256  # as cudaMalloc: addresses are aligned like those of separate arrays
_NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "int64": np.int64,
    "bool": np.bool_,
}

PackedPart = tuple[str, tuple[int, ...], str]
"""Name, shape and type (a key of ``device.ELEMENT_BYTES``) of one array."""


@dataclass(frozen=True)
class PackedArrays:
    """Arrays by name that lie one after the other in a ``PackedBuffer``, on both sides.

    num_bytes: from the start of the buffer to the end of the last array.
    """

    on_host: dict[str, NDArray[Any]]
    on_device: dict[str, DeviceArray]
    num_bytes: int


class PackedBuffer:
    """Pinned and device memory of one size; each use lays out its own arrays in it."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """Allocate both sides; raise MemoryError, with nothing allocated, without room."""
        self._device = device
        self._written_at = -1  # ``num_waits`` of the device at the last write
        self._memory = device.allocate((num_bytes,), "uint8")
        try:
            self._pinned = device.allocate_pinned(num_bytes)
        except MemoryError:
            device.free(self._memory)
            raise

    def lay_out(self, parts: Sequence[PackedPart]) -> PackedArrays:
        """Return arrays of these parts, in this order; they share memory with other layouts."""
        on_host: dict[str, NDArray[Any]] = {}
        on_device: dict[str, DeviceArray] = {}
        for (name, shape, dtype), (start, stop) in zip(parts, _extents(parts), strict=True):
            on_host[name] = self._pinned[start:stop].view(_NUMPY_DTYPES[dtype]).reshape(shape)
            on_device[name] = self._memory.part(start, shape, dtype)
        return PackedArrays(on_host, on_device, packed_bytes(parts))

    def begin_write(self) -> None:
        """Wait until the device has read the last write, before the host writes again."""
        if self._written_at == self._device.num_waits:
            self._device.synchronize()
        self._written_at = self._device.num_waits

    def upload(self, num_bytes: int) -> None:
        """Queue the copy of the first bytes to the device."""
        self._device.upload(self._pinned[:num_bytes], self._memory)

    def download(self, num_bytes: int) -> None:
        """Queue the copy of the first bytes to the host."""
        self._device.download(self._memory, self._pinned[:num_bytes])

    def free(self) -> None:
        """Free both sides."""
        self._device.free(self._memory)
        self._device.free_pinned(self._pinned)


def packed_bytes(parts: Sequence[PackedPart]) -> int:
    """Return the bytes from the start of the first part to the end of the last."""
    return _extents(parts)[-1][1]


def _extents(parts: Sequence[PackedPart]) -> list[tuple[int, int]]:
    extents, stop = [], 0
    for _, shape, dtype in parts:
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + math.prod(shape) * ELEMENT_BYTES[dtype]
        extents.append((start, stop))
    return extents


def move_parts(num_rows: int) -> list[PackedPart]:
    """Return the parts of the inputs of the prune graph, without caches."""
    return [(WRITE_INDICES, (1,), "int64"), (SRC_ROWS, (num_rows,), "int64")]


def fill_move(staged: PackedArrays, src_rows: NDArray[np.int64], first_row: int) -> None:
    """Write the inputs of a move; the padding copies the last source row again."""
    staged.on_host[WRITE_INDICES][0] = first_row
    fill_padded(staged.on_host[SRC_ROWS], src_rows, int(src_rows[-1]))


def fill_padded(target: NDArray[Any], array: NDArray[Any], padding: int) -> None:
    """Write an array to the beginning of a larger one, and ``padding`` to the rest."""
    target[tuple(map(slice, array.shape))] = array
    if target.shape != array.shape:
        axis = next(n for n, size in enumerate(array.shape) if size < target.shape[n])
        target[(*[slice(None)] * axis, slice(array.shape[axis], None))] = padding


def fill_mask(target: NDArray[np.bool_], mask: NDArray[np.bool_], first_row: int) -> None:
    """Write a mask (1, 1, S, C) to a larger one (1, 1, padded S, C).

    Padding rows are written to the cache after the call's own rows, where they are masked and the
    next call overwrites them. Each attends to itself: a row without visible columns may become
    NaN, and a NaN in the cache reaches every row, because masked rows are multiplied by 0, not
    skipped. It also attends to column 0, which is in use: on CUDA, ONNX Runtime searches each row
    of a mask sequentially for the first visible column.
    """
    num_new, padded = mask.shape[2], target[0, 0]
    padding = np.arange(num_new, len(padded))
    padded[:num_new] = mask[0, 0]
    padded[num_new:] = False
    padded[num_new:, 0] = True
    padded[padding, first_row + padding] = True
