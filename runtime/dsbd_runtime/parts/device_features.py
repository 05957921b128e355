"""Features in device memory: where they lie between the calls, and what a call reads of them.

They never cross to the host. A call's features are copied out of the engine's output, which the
next call of the size overwrites, and gathered into a later call's input, both on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.device.device import ELEMENT_BYTES, Device, DeviceArray
from dsbd_runtime.engine import graph
from dsbd_runtime.engine.session import EngineInputs
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.features import Piece, ReadFeatures


class FeatureStore:
    """Memory for the features of one engine, an array of a power of two of rows for each forward.

    Arrays that nobody holds any more are used again.
    """

    def __init__(self, device: Device, entry: ModelEntry) -> None:
        assert entry.features is not None  # the caller has asked the manifest
        self.role = "draft" if entry.is_feature_draft else "target"
        self._device = device
        self._width = entry.features.returned_width
        self._dtype = entry.dtype
        self._arrays: list[DeviceArray] = []
        self._unused: dict[int, list[DeviceArray]] = {}
        self._is_closed = False

    def take(self, num_rows: int) -> DeviceFeatures:
        """Return room for so many rows.

        Raises CapacityError when the device has no memory.
        """
        room = 1 << max(num_rows - 1, 0).bit_length()
        unused = self._unused.setdefault(room, [])
        if not unused:
            try:
                unused.append(self._device.allocate((room, self._width), self._dtype))
            except MemoryError as error:
                raise CapacityError(
                    f"{self._device.name} has no memory for the features of {room} rows; ask for "
                    "fewer beams or a shorter draft, or close other programs on the device"
                ) from error
            self._arrays.append(unused[-1])
        return DeviceFeatures(self, unused.pop(), num_rows)

    def give_back(self, array: DeviceArray) -> None:
        """Let the memory of features that nobody holds be used again."""
        if not self._is_closed:
            self._unused[array.shape[0]].append(array)

    def copied(self, array: DeviceArray, row: int) -> DeviceFeatures:
        """Return one row in an array of its own."""
        copy = self.take(1)
        copy_feature_rows(self._device, array, row, copy.array, 0, 1)
        self._device.synchronize()  # another engine's queue may read it next
        return copy

    def free(self) -> None:
        """Give all memory back, that of features which are still held too."""
        self._is_closed = True
        for array in self._arrays:
            self._device.free(array)
        self._arrays.clear()
        self._unused.clear()


class DeviceFeatures:
    """Features in device memory, which goes back to the store with the last reference.

    Attributes:
        array: (room, width), of which the first rows are in use.
    """

    def __init__(self, store: FeatureStore, array: DeviceArray, num_rows: int) -> None:
        self.array = array
        self._store = store
        self._num_rows = num_rows

    @property
    def role(self) -> str:
        """See Features."""
        return self._store.role

    def __len__(self) -> int:
        return self._num_rows

    def copied(self, row: int) -> DeviceFeatures:
        """See Features."""
        return self._store.copied(self.array, row)

    def __del__(self) -> None:
        self._store.give_back(self.array)


@dataclass(frozen=True)
class FeatureSizes:
    """The rows that a call is bound for: S of a feature draft, the others powers of two.

    Attributes:
        returned: that the engine returns: F of a target, S of a feature draft.
        target, own: that a feature draft reads of either, F and P; 0 of a target.
    """

    returned: int
    target: int = 0
    own: int = 0


class FeatureArrays:
    """The engine's inputs and outputs of features in device memory, by the rows of a call.

    They outlast the caches; those of one size are shared by all calls that are bound to it.
    """

    def __init__(self, device: Device, entry: ModelEntry) -> None:
        assert entry.features is not None  # the caller has asked the manifest
        self._device = device
        self._entry = entry
        self._widths = {
            graph.FEATURES: entry.features.returned_width,
            graph.TARGET_FEATURES: entry.features.width,
            graph.OWN_FEATURES: entry.features.own_width or 0,
        }
        self._arrays: dict[tuple[str, int], DeviceArray] = {}

    def of(self, sizes: FeatureSizes) -> dict[str, DeviceArray]:
        """Return the arrays of a call by tensor; raise MemoryError without room."""
        rows = {graph.FEATURES: sizes.returned}
        if self._entry.is_feature_draft:
            rows |= {graph.TARGET_FEATURES: sizes.target, graph.OWN_FEATURES: sizes.own}
        return {name: self._array(name, number) for name, number in rows.items()}

    def free(self) -> None:
        """Give the memory back; the calls that are bound to it have been released."""
        for array in self._arrays.values():
            self._device.free(array)
        self._arrays.clear()

    def _array(self, name: str, num_rows: int) -> DeviceArray:
        key = name, num_rows
        if key not in self._arrays:
            shape = num_rows, self._widths[name]
            self._arrays[key] = self._device.allocate(shape, self._entry.dtype)
        return self._arrays[key]


def copy_feature_rows(
    device: Device,
    source: DeviceArray,
    source_row: int,
    target: DeviceArray,
    target_row: int,
    num_rows: int,
) -> None:
    """Queue the copy of neighbouring rows of one (n, width) array to another."""
    width = source.shape[1]
    row_bytes = width * ELEMENT_BYTES[source.dtype]
    shape = (1, 1, num_rows, width)
    device.copy_rows(
        source.part(source_row * row_bytes, shape, source.dtype),
        target.part(target_row * row_bytes, shape, target.dtype),
        num_rows,
    )


def gather_rows(device: Device, pieces: Sequence[Piece], target: DeviceArray) -> None:
    """Queue the copies of the rows of all pieces to the first rows of an input.

    Neighbouring rows go together: of [4, 5, 6, 2] there are two copies.
    """
    first = 0
    for piece in pieces:
        breaks = (np.diff(piece.rows) != 1).nonzero()[0] + 1
        for run in np.split(piece.rows, breaks):
            copy_feature_rows(device, piece.features.array, int(run[0]), target, first, len(run))
            first += len(run)


def keep_returned(device: Device, inputs: EngineInputs, returned: DeviceArray) -> None:
    """Queue the copy of what a call has returned to where it is kept."""
    rows = inputs.forward.feature_rows
    if rows is not None and len(rows):
        kept, first = inputs.features.array, inputs.first_feature
        copy_feature_rows(device, returned, 0, kept, first, len(rows))


def padded_index(read: ReadFeatures, num_target: int) -> NDArray[np.int64]:
    """Return the index of a call that is bound for ``num_target`` rows of the target's features."""
    is_own = read.index >= read.num_target
    index: NDArray[np.int64] = read.index + is_own * (num_target - read.num_target)
    return index
