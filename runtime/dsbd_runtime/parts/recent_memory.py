"""Recent rows and the states of checkpoints in host memory, and the graph that folds rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import Ints
from dsbd_runtime.engine.graph import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    FOLDED_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
)
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.parts.cache_entries import (
    CacheEntry,
    folded_name,
    num_ancestors,
    past_name,
    recent,
    recurrent,
)
from dsbd_runtime.parts.fold_chains import FOLDED_TOGETHER, LEFT_BEHIND
from dsbd_runtime.parts.kv_cache import KVCache, NewRows, row_bytes
from dsbd_runtime.parts.recent_rows import RecentInputs

_STATE_BYTES = 4  # of a number, in fp32
_STEP = 32  # rows; a recurrent layer looks at all of them in every call


def recent_capacity(num_rows: int) -> int:
    """Return the capacity for so many recent rows: 32, 64, 96, ..."""
    return max(1, -(-num_rows // _STEP)) * _STEP


def path_bytes(caches: Sequence[CacheEntry]) -> int:
    """Return the bytes of a path that is kept by itself, beside those of its attention rows.

    They are the states of its checkpoint and as many recent rows as are behind that as a rule. A
    request is one such path, and so is each of its beams that has parted from the others for long.
    """
    num_rows = recent_capacity(LEFT_BEHIND + FOLDED_TOGETHER + 1)
    states = (shape for entry in recurrent(caches) for shape in entry.states.values())
    return num_rows * row_bytes(recent(caches)) + sum(_STATE_BYTES * math.prod(s) for s in states)


class HostRecentMemory:
    """Recent rows of one engine, and the states of checkpoints [B, H, Dk, Dv]; the first is zero.

    Attributes:
        rows: of all kinds.
        states: by input name; replaced when the number of checkpoints changes.
    """

    def __init__(
        self,
        caches: Sequence[CacheEntry],
        fold_path: Path,
        open_fold: Callable[[Path], Any],
        new_rows: NewRows = np.zeros,
    ) -> None:
        """Take the smallest memory.

        open_fold: opens the fold graph, which only engines with recurrences have.
        """
        self.rows = KVCache(recent(caches), recent_capacity, new_rows)
        self.states: dict[str, NDArray[np.float32]] = {
            name: np.zeros((1, *shape), np.float32)
            for entry in recurrent(caches)
            for name, shape in entry.states.items()
        }
        self._has_ancestors = num_ancestors(caches) > 0
        self._read = [(entry.layer, part) for entry in recurrent(caches) for part in entry.parts]
        self._fold_path = fold_path
        self._fold = open_fold(fold_path) if self.states else None

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and states."""
        return self.rows.num_bytes + sum(state.nbytes for state in self.states.values())

    def reserve(self, num_rows: int, num_used: int) -> None:
        """See RecentMemory."""
        capacity = recent_capacity(num_rows)
        if num_used == 0 or capacity > self.rows.capacity:
            self.rows.resize(capacity, num_used)

    def shrink(self, num_used: int) -> None:
        """See RecentMemory; a little room more is left, so that it is not taken again at once."""
        capacity = recent_capacity(num_used + 2 * _STEP)
        if num_used and capacity < self.rows.capacity:
            self.rows.resize(capacity, num_used)

    def move_rows(self, src_rows: Ints, first_row: int) -> None:
        """See RecentMemory."""
        self.rows.move_rows(src_rows, first_row)

    def reserve_checkpoints(self, number: int) -> None:
        """See RecentMemory."""
        for name, old in self.states.items():
            if len(old) == number:
                return
            try:
                new = np.zeros((number, *old.shape[1:]), np.float32)
            except MemoryError as error:
                raise CapacityError(
                    f"no memory for the states of {number} paths, {self.num_bytes} bytes are in "
                    "use; ask for fewer beams or fewer requests at a time"
                ) from error
            kept = min(number, len(old))
            new[:kept] = old[:kept]
            self.states[name] = new

    def fold(self, rows: Ints, source: int, target: int) -> None:
        """See RecentMemory."""
        if self._fold is None:  # convolutions alone have no state
            return
        names = list(self.states)
        inputs: dict[str, NDArray[Any]] = {
            FOLDED_ROWS: rows,
            **{past_name(*key): self.rows.buffers[key] for key in self._read},
            **{name: self.states[name][source : source + 1] for name in names},
        }
        try:
            found = self._fold.run([folded_name(name) for name in names], inputs)
        except Exception as error:  # ONNX Runtime's exceptions share no base but this one
            raise EngineError(
                f"ONNX Runtime failed in a call of {self._fold_path} ({len(rows)} rows): "
                f"{' '.join(str(error).split())}; copy the bundle or export again"
            ) from error
        for name, state in zip(names, found, strict=True):
            self.states[name][target] = state[0]

    def inputs(self, call: RecentInputs) -> dict[str, NDArray[Any]]:
        """Return the inputs of an engine call, the buffers of the rows aside."""
        inputs: dict[str, NDArray[Any]] = {
            RECENT_WRITE_INDICES: np.array([call.first_row], np.int64)
        }
        if self._has_ancestors:
            inputs[ANCESTORS] = np.ascontiguousarray(call.ancestors)
        if self.states:
            mask = np.zeros((1, 1, len(call.mask), self.rows.capacity), np.bool_)
            mask[0, 0, :, : call.mask.shape[1]] = call.mask
            inputs[RECENT_MASK] = mask
            inputs[CHECKPOINT_ROWS], inputs[ROW_PLACES] = call.checkpoint_rows, call.row_places
            first, number = call.first_checkpoint, len(call.checkpoint_rows)
            states = self.states.items()
            inputs |= {name: state[first : first + number] for name, state in states}
        return inputs
