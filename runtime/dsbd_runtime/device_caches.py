"""The key/value caches of one engine in device memory: one array a layer and part."""

from __future__ import annotations

from dsbd_runtime.device import Device, DeviceArray
from dsbd_runtime.graph import CACHE_PARTS, past_name, present_name
from dsbd_runtime.manifest import KVGeometry


class DeviceCaches:
    """Arrays [1, num_heads, capacity, head_dim] of one capacity, zero where nobody wrote.

    Another capacity is another object: ``copy_from`` brings the rows over on the device.
    """

    def __init__(self, device: Device, geometry: KVGeometry, capacity: int) -> None:
        """Take the memory; raise MemoryError, with nothing taken, when the device has no room."""
        self._device = device
        self.capacity = capacity
        self._arrays: dict[tuple[int, str], DeviceArray] = {}
        shape = (1, geometry.num_heads, capacity, geometry.head_dim)
        try:
            for layer in range(geometry.num_layers):
                for part in CACHE_PARTS:
                    self._arrays[layer, part] = device.allocate(shape, geometry.dtype)
        except MemoryError:
            self.free()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes that all arrays take."""
        return sum(array.num_bytes for array in self._arrays.values())

    @property
    def inputs(self) -> dict[str, DeviceArray]:
        """The arrays by the names under which an engine reads them."""
        return {past_name(*key): array for key, array in self._arrays.items()}

    @property
    def outputs(self) -> dict[str, DeviceArray]:
        """The same arrays by the names under which an engine writes them."""
        return {present_name(*key): array for key, array in self._arrays.items()}

    def copy_from(self, other: DeviceCaches, num_rows: int) -> None:
        """Queue the copy of the first rows of caches of another capacity."""
        for key, array in self._arrays.items():
            self._device.copy_rows(other._arrays[key], array, num_rows)

    def fill_zero(self) -> None:
        """Queue setting all rows to zero."""
        for array in self._arrays.values():
            self._device.fill_zero(array)

    def free(self) -> None:
        """Give the memory back."""
        for array in self._arrays.values():
            self._device.free(array)
        self._arrays.clear()
