"""Several small arrays in one pinned buffer and one device buffer: one copy moves them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.device import ELEMENT_BYTES, Device, DeviceArray

_ALIGNMENT = 256  # what cudaMalloc gives, so that no kernel meets a worse address than it would
_NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "int64": np.int64,
    "bool": np.bool_,
}

Part = tuple[str, tuple[int, ...], str]
"""Name, shape and type (a key of ``device.ELEMENT_BYTES``) of one array."""


@dataclass(frozen=True)
class PackedArrays:
    """Arrays that lie one after the other in a ``PackedBuffer``, on both sides.

    Attributes:
        on_host: views of the pinned memory, by name.
        on_device: the same parts of the device memory, by name.
        num_bytes: from the start of the buffer to the end of the last array.
    """

    on_host: dict[str, NDArray[Any]]
    on_device: dict[str, DeviceArray]
    num_bytes: int


class PackedBuffer:
    """Pinned and device memory of one size, in which each use lays out arrays of its own."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """Take the memory on both sides; raise MemoryError, with nothing taken, without room."""
        self._device = device
        self._memory = device.allocate((num_bytes,), "uint8")
        try:
            self._pinned = device.allocate_pinned(num_bytes)
        except MemoryError:
            device.free(self._memory)
            raise

    def lay_out(self, parts: Sequence[Part]) -> PackedArrays:
        """Return arrays of these parts, in this order; they share memory with other layouts."""
        on_host: dict[str, NDArray[Any]] = {}
        on_device: dict[str, DeviceArray] = {}
        for (name, shape, dtype), (start, stop) in zip(parts, _extents(parts), strict=True):
            on_host[name] = self._pinned[start:stop].view(_NUMPY_DTYPES[dtype]).reshape(shape)
            on_device[name] = self._memory.part(start, shape, dtype)
        return PackedArrays(on_host, on_device, packed_bytes(parts))

    def upload(self, num_bytes: int) -> None:
        """Queue the copy of the first bytes to the device."""
        self._device.upload(self._pinned[:num_bytes], self._memory)

    def download(self, num_bytes: int) -> None:
        """Queue the copy of the first bytes to the host."""
        self._device.download(self._memory, self._pinned[:num_bytes])

    def free(self) -> None:
        """Give the memory back on both sides."""
        self._device.free(self._memory)
        self._device.free_pinned(self._pinned)


def packed_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes from the start of the first part to the end of the last."""
    return _extents(parts)[-1][1]


def _extents(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return first byte and end of each part."""
    extents, stop = [], 0
    for _, shape, dtype in parts:
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + math.prod(shape) * ELEMENT_BYTES[dtype]
        extents.append((start, stop))
    return extents
