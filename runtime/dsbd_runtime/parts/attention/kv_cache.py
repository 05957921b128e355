"""Key/value caches of one engine, in host memory or on a device: one buffer per layer and part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.devices import Device, DeviceArray
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.parts.attention.cache_entries import (
    CacheEntry,
    parts_of,
    past_name,
    present_name,
    source_name,
)
from dsbd_runtime.parts.host_binder import HostBinder
from dsbd_runtime.parts.part import HostPlace, NewRows

NUMPY_DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16}
_NUM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_SMALLEST_BUCKETS = (128, 256)
_SMALLEST_STEP = 64


def bucket_capacity(num_rows: int) -> int:
    """Return the capacity for ``num_rows`` rows: 128, 256, 320, 384, ..., 1024, 1152, ...

    The time of attention is proportional to the capacity, and growth copies the cache. So a step is
    a sixteenth of the next power of two: a long cache has at most a ninth of its rows free.
    """
    for bucket in _SMALLEST_BUCKETS:
        if num_rows <= bucket:
            return bucket
    power = 1 << (num_rows - 1).bit_length()  # smallest power of two >= num_rows
    step = max(_SMALLEST_STEP, power // 16)
    return -(-num_rows // step) * step


def row_bytes(caches: Sequence[CacheEntry]) -> int:
    """Return the bytes of one row in all of these caches."""
    return sum(cache.numbers_a_row * _NUM_BYTES[cache.dtype] for cache in caches)


class KVCache:
    """Key/value buffers [1, num_heads, capacity, width] that an engine updates in place.

    Unwritten rows are zero: masked rows still enter a product with weight 0, so they must be
    finite. ``buffers`` by (layer, part) are replaced when the capacity changes.
    """

    def __init__(
        self,
        caches: Sequence[CacheEntry],
        bucket: Callable[[int], int] = bucket_capacity,
        new_rows: NewRows = np.zeros,
    ) -> None:
        """Take the smallest capacity, ``bucket(0)``."""
        self.capacity = bucket(0)
        self._new_rows = new_rows
        self._row_bytes = row_bytes(caches)
        self.buffers: dict[tuple[int, str], NDArray[np.generic]] = {
            (cache.layer, part): new_rows(
                cache.shape(part, self.capacity), NUMPY_DTYPES[cache.dtype]
            )
            for cache, part in parts_of(caches)
        }

    @property
    def num_bytes(self) -> int:
        return self.capacity * self._row_bytes

    def resize(self, capacity: int, num_used: int) -> None:
        """Give every buffer ``capacity`` rows and keep the first ``num_used``; the rest is zero.

        Buffers are replaced one after the other, so that the peak is the new size and one old
        buffer. For this, no other references to the old buffers may exist. After a CapacityError
        the caches are as before.
        """
        old_capacity = self.capacity
        try:
            self._resize_buffers(capacity, num_used)
        except MemoryError as error:
            self._resize_buffers(old_capacity, num_used)
            raise CapacityError(
                f"no memory for a key/value cache of {capacity} rows, "
                f"{self.num_bytes // old_capacity * capacity} bytes (it has {old_capacity} rows); "
                "shorten the prompt, ask for fewer new tokens or fewer beams"
            ) from error
        self.capacity = capacity

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        stop = first_row + src_rows.shape[0]
        for buffer in self.buffers.values():
            buffer[:, :, first_row:stop] = buffer.take(src_rows, axis=2)

    def _resize_buffers(self, capacity: int, num_used: int) -> None:
        for key in self.buffers:
            old = self.buffers[key]
            if num_used == 0 or old.shape[2] != capacity:
                new = self._new_buffer(old, capacity)
                new[:, :, :num_used] = old[:, :, :num_used]
                self.buffers[key] = new

    def _new_buffer(self, old: NDArray[np.generic], capacity: int) -> NDArray[np.generic]:
        return self._new_rows((*old.shape[:2], capacity, old.shape[3]), old.dtype)


class HostRows:
    """The caches of an engine on the host: each array is bound as both ``past`` and ``present``.

    So TensorScatter writes in place. The bound values share the memory of the arrays, so that
    ``move_rows`` needs no engine call.
    """

    def __init__(self, caches: Sequence[CacheEntry], place: HostPlace) -> None:
        """Take the smallest capacity; CapacityError: there is no memory for it."""
        self._binder = place.binder
        try:
            self._cache: KVCache | None = KVCache(caches, new_rows=place.new_rows)
        except (MemoryError, ValueError) as error:  # numpy has no shape that large, or no memory
            raise CapacityError(
                f"no memory for the smallest key/value cache of {place.folder}, {caches[0]} and as "
                f"many as {len(caches)} in all: {error}; close other programs that use the memory, "
                "or export again"
            ) from error

    @property
    def capacity(self) -> int:
        return 0 if self._cache is None else self._cache.capacity

    @property
    def num_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.num_bytes

    def bind(self, binder: HostBinder) -> None:
        for key, buffer in self._open().buffers.items():
            binder.update(past_name(*key), present_name(*key), buffer)

    def reserve(self, num_rows: int, num_used: int) -> None:
        cache, capacity = self._open(), bucket_capacity(num_rows)
        if num_used == 0 or capacity > cache.capacity:
            self._resize(cache, capacity, num_used)

    def shrink(self, num_used: int) -> None:
        cache, capacity = self._open(), bucket_capacity(num_used)
        if capacity < cache.capacity:
            self._resize(cache, capacity, num_used)

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        self._open().move_rows(src_rows, first_row)

    def close(self) -> None:
        self._cache = None

    def _resize(self, cache: KVCache, capacity: int, num_used: int) -> None:
        # The binding refers to the arrays: it is cleared first, so that replaced ones are freed.
        self._binder.clear()
        if capacity <= cache.capacity // 4:
            self._binder.release_memory()
        cache.resize(capacity, num_used)

    def _open(self) -> KVCache:
        if self._cache is None:
            raise EngineError(f"{self._binder.name} is closed; load it again")
        return self._cache


class DeviceCaches:
    """Arrays [1, num_heads, capacity, width] of one capacity; unwritten rows are zero."""

    def __init__(self, device: Device, caches: Sequence[CacheEntry], capacity: int) -> None:
        """Take the memory; MemoryError: the device has no room, and nothing was taken."""
        self._device = device
        self.capacity = capacity
        self.num_bytes = capacity * row_bytes(caches)
        self._arrays: dict[tuple[int, str], DeviceArray] = {}
        try:
            for cache, part in parts_of(caches):
                array = device.allocate(cache.shape(part, capacity), cache.dtype)
                self._arrays[cache.layer, part] = array
        except MemoryError:
            self.free()
            raise

    @property
    def inputs(self) -> dict[str, DeviceArray]:
        return {past_name(*key): array for key, array in self._arrays.items()}

    @property
    def outputs(self) -> dict[str, DeviceArray]:
        return {present_name(*key): array for key, array in self._arrays.items()}

    @property
    def sources(self) -> dict[str, DeviceArray]:
        """Inputs of a prune graph that copies rows of these caches to others."""
        return {source_name(past_name(*key)): array for key, array in self._arrays.items()}

    def copy_from(self, other: DeviceCaches, num_rows: int) -> None:
        """Queue the copy of the first rows from caches of another capacity."""
        for key, array in self._arrays.items():
            self._device.copy_rows(other._arrays[key], array, num_rows)

    def fill_zero(self) -> None:
        for array in self._arrays.values():
            self._device.fill_zero(array)

    def free(self) -> None:
        for array in self._arrays.values():
            self._device.free(array)
        self._arrays.clear()
