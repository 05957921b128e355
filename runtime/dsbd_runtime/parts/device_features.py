"""Features in device memory: where they lie between the calls, and what a call reads of them.

They never cross to the host. A call's features are copied out of the engine's output, which the
next call of the size overwrites, and gathered into a later call's input, both on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dsbd_runtime.devices import Device, DeviceArray, copy_array_rows
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.feature_memory import (
    FEATURE_INDEX,
    FEATURES,
    OWN_FEATURES,
    TARGET_FEATURES,
    Piece,
    ReadFeatures,
)
from dsbd_runtime.parts.part import DeviceBinder


class DeviceFeatures:
    """Features in device memory: the first rows of ``array``, (room, width)."""

    def __init__(self, memory: DeviceFeatureMemory, array: DeviceArray, num_rows: int) -> None:
        self.array = array
        self._memory = memory
        self._num_rows = num_rows

    @property
    def role(self) -> str:
        return self._memory.role

    def __len__(self) -> int:
        return self._num_rows

    def copied(self, row: int) -> DeviceFeatures:
        return self._memory.copied(self.array, row)

    def __del__(self) -> None:
        self._memory.give_back(self.array)


class DeviceFeatureMemory:
    """Features of one engine in device memory, an array of a power of two of rows for each forward.

    The arrays that calls read and write outlast the caches; those of one size are shared by all
    calls that are bound to it.
    """

    kind = DeviceFeatures

    def __init__(self, device: Device, role: str, widths: Mapping[str, int], dtype: str) -> None:
        self.role = role
        self._device = device
        self._widths = widths
        self._dtype = dtype
        self._kept: list[DeviceArray] = []  # of all features
        self._unused: dict[int, list[DeviceArray]] = {}  # of them, by number of rows
        self._arrays: dict[tuple[str, int], DeviceArray] = {}
        self._is_closed = False

    def take(self, num_rows: int) -> DeviceFeatures:
        """See HostFeatureMemory; raise CapacityError when the device has no memory."""
        room = 1 << max(num_rows - 1, 0).bit_length()
        unused = self._unused.setdefault(room, [])
        if not unused:
            try:
                unused.append(self._device.allocate((room, self._widths[FEATURES]), self._dtype))
            except MemoryError as error:
                raise CapacityError(
                    f"{self._device.name} has no memory for the features of {room} rows; ask for "
                    "fewer beams or a shorter draft, or close other programs on the device"
                ) from error
            self._kept.append(unused[-1])
        return DeviceFeatures(self, unused.pop(), num_rows)

    def give_back(self, array: DeviceArray) -> None:
        if not self._is_closed:
            self._unused[array.shape[0]].append(array)

    def copied(self, array: DeviceArray, row: int) -> DeviceFeatures:
        """Return one row in an array of its own."""
        copy = self.take(1)
        copy_array_rows(self._device, array, row, copy.array, 0, 1)
        self._device.synchronize()  # another engine's queue may read it next
        return copy

    def bind_returned(
        self, binder: DeviceBinder, kept: DeviceFeatures, first: int, number: int, dim: str
    ) -> None:
        """See HostFeatureMemory: what the engine has written is copied to where it is kept."""
        written = self._use(binder, FEATURES, dim, number)
        if number:
            binder.after(
                lambda: copy_array_rows(self._device, written, 0, kept.array, first, number)
            )

    def bind_read(self, binder: DeviceBinder, read: ReadFeatures) -> None:
        """See HostFeatureMemory: the rows are gathered to where the engine reads them."""
        target = self._use(binder, TARGET_FEATURES, "T", read.num_target)
        own = self._use(binder, OWN_FEATURES, "P", read.num_own)

        def gather() -> None:
            gather_rows(self._device, read.target, target)
            gather_rows(self._device, read.own, own)

        binder.before(gather)
        is_own = read.index >= read.num_target
        padded = read.index + is_own * (target.shape[0] - read.num_target)
        binder.write({FEATURE_INDEX: padded}, -1)

    def close(self) -> None:
        """See HostFeatureMemory; the calls that are bound to it have been released."""
        self._is_closed = True
        for array in (*self._arrays.values(), *self._kept):
            self._device.free(array)
        self._arrays.clear()
        self._kept.clear()
        self._unused.clear()

    def _use(self, binder: DeviceBinder, name: str, dim: str, number: int) -> DeviceArray:
        """Return the array of a call for so many rows; raise MemoryError without room."""
        key = name, binder.size(dim, number)
        if key not in self._arrays:
            shape = key[1], self._widths[name]
            self._arrays[key] = self._device.allocate(shape, self._dtype)
        binder.use(name, self._arrays[key])
        return self._arrays[key]


def gather_rows(device: Device, pieces: Sequence[Piece], target: DeviceArray) -> None:
    """Queue the copies of the rows of all pieces to the first rows of an input.

    Neighbouring rows go together: of [4, 5, 6, 2] there are two copies.
    """
    first = 0
    for piece in pieces:
        breaks = (np.diff(piece.rows) != 1).nonzero()[0] + 1
        for run in np.split(piece.rows, breaks):
            copy_array_rows(device, piece.features.array, int(run[0]), target, first, len(run))
            first += len(run)
