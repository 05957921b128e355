"""Features in memory: their place between calls, and the features that a call reads.

Features in device memory never cross to the host. The engine's output is overwritten by the next
call of the same size, so a call's features are copied out of it. A later call gathers them into its
input. Both happen on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ParentFeatures
from dsbd_forward.rows import Ints
from dsbd_runtime.devices import Device, DeviceArray
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.device_binder import StagedCall
from dsbd_runtime.parts.host_binder import HostBinder

FEATURE_ROWS = "feature_rows"
FEATURES = "features"
TARGET_FEATURES = "target_features"
OWN_FEATURES = "own_features"
FEATURE_INDEX = "feature_index"


@dataclass(eq=False, slots=True)
class Piece:
    """Rows of the features of one forward: ``features[rows]``."""

    features: Any
    rows: Ints


@dataclass(eq=False, slots=True)
class ReadFeatures:
    """The features that the S rows of a call of a feature draft come from."""

    target: list[Piece]  # rows of the target's features that the call reads
    own: list[Piece]  # the same of the draft's own features
    index: Ints  # (S,). For each row, its index in target and own joined; -1: zeros

    @classmethod
    def of(cls, parents: ParentFeatures) -> ReadFeatures:
        """Sort the parents' features by the engine that computed them.

        With forwards of target, draft and target, the sources [2, 1, 2, -1] give the index
        [0, 2, 1, -1].
        """
        index = np.full(len(parents.sources), -1)
        placed = []
        for number in np.unique(parents.sources).tolist():
            if number < 0:
                continue
            features, at = parents.forwards[number], (parents.sources == number).nonzero()[0]
            placed.append((features.role != "target", Piece(features, parents.rows[at]), at))
        placed.sort(key=lambda each: each[0])
        first = 0
        for _, _, at in placed:
            index[at] = np.arange(first, first + len(at))
            first += len(at)
        target = [piece for is_own, piece, _ in placed if not is_own]
        return cls(target, [piece for is_own, piece, _ in placed if is_own], index)

    @property
    def num_target(self) -> int:
        """T, the number of the target's features that are read."""
        return sum(len(piece.rows) for piece in self.target)

    @property
    def num_own(self) -> int:
        """P, the number of the draft's own features that are read."""
        return sum(len(piece.rows) for piece in self.own)


@dataclass(eq=False, slots=True)
class HostFeatures:
    """Features in host memory: the array (n, width) that the engine has written."""

    role: str
    array: NDArray[Any]

    def __len__(self) -> int:
        return len(self.array)

    def copied(self, row: int) -> HostFeatures:
        return HostFeatures(self.role, self.array[row : row + 1].copy())


class HostFeatureMemory:
    """Features in host memory, each forward's in an array of its own."""

    kind = HostFeatures  # the only features that a call can read

    def __init__(self, role: str, widths: Mapping[str, int], dtype: str) -> None:
        self._role = role
        self._widths = widths
        self._dtype = NUMPY_DTYPES[dtype]

    def take(self, num_rows: int) -> HostFeatures:
        """Return room for the features of so many rows."""
        return HostFeatures(self._role, np.empty((num_rows, self._widths[FEATURES]), self._dtype))

    def bind_returned(
        self, binder: HostBinder, kept: HostFeatures, first: int, number: int, dim: str
    ) -> None:
        """Let the next call write ``number`` features, of dimension ``dim``, from ``first``."""
        binder.write_to(FEATURES, kept.array[first : first + number])

    def bind_read(self, binder: HostBinder, read: ReadFeatures) -> None:
        """Let the next call read the features of its rows' parents."""
        pieces = {TARGET_FEATURES: read.target, OWN_FEATURES: read.own}
        rows = {
            name: host_rows(pieces_of_input, self._widths[name], self._dtype)
            for name, pieces_of_input in pieces.items()
        }
        binder.write({**rows, FEATURE_INDEX: read.index})

    def close(self) -> None:
        """Do nothing: arrays last as long as they are held."""


def host_rows(pieces: list[Piece], width: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the rows of all pieces as one array; a contiguous single piece is not copied."""
    if len(pieces) == 1:
        (piece,) = pieces
        first = int(piece.rows[0])
        if np.array_equal(piece.rows, np.arange(first, first + len(piece.rows))):
            rows: NDArray[Any] = piece.features.array[first : first + len(piece.rows)]
            return rows
    parts = [piece.features.array[piece.rows] for piece in pieces]
    return np.concatenate([np.empty((0, width), dtype), *parts])


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
        self._kept: list[DeviceArray] = []  # arrays of all features
        self._unused: dict[int, list[DeviceArray]] = {}  # the unused of them, by number of rows
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
        copy = self.take(1)
        self._device.copy_rows(array, copy.array, 1, row)
        self._device.synchronize()  # another engine's queue may read it next
        return copy

    def bind_returned(
        self, binder: StagedCall, kept: DeviceFeatures, first: int, number: int, dim: str
    ) -> None:
        """See HostFeatureMemory: the engine's output is copied to ``kept``."""
        written = self._use(binder, FEATURES, dim, number)
        if number:
            binder.after(
                lambda: self._device.copy_rows(written, kept.array, number, target_row=first)
            )

    def bind_read(self, binder: StagedCall, read: ReadFeatures) -> None:
        """See HostFeatureMemory: the rows are gathered into the engine's inputs."""
        target = self._use(binder, TARGET_FEATURES, "T", read.num_target)
        own_rows = self._use(binder, OWN_FEATURES, "P", read.num_own)

        def gather() -> None:
            gather_rows(self._device, read.target, target)
            gather_rows(self._device, read.own, own_rows)

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

    def _use(self, binder: StagedCall, name: str, dim: str, number: int) -> DeviceArray:
        """Return a call's array for ``number`` rows; raise MemoryError without room."""
        key = name, binder.size(dim, number)
        if key not in self._arrays:
            shape = key[1], self._widths[name]
            self._arrays[key] = self._device.allocate(shape, self._dtype)
        binder.use(name, self._arrays[key])
        return self._arrays[key]


def gather_rows(device: Device, pieces: Sequence[Piece], target: DeviceArray) -> None:
    """Queue copies of all pieces' rows to the first ones of an input: two for [4, 5, 6, 2]."""
    first = 0
    for piece in pieces:
        breaks = (np.diff(piece.rows) != 1).nonzero()[0] + 1
        for run in np.split(piece.rows, breaks):
            device.copy_rows(piece.features.array, target, len(run), int(run[0]), first)
            first += len(run)
