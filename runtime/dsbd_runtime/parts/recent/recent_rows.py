"""Recent rows: those that convolutions and recurrences keep, with the states of checkpoints.

| tensor | shape, type | meaning |
|---|---|---|
| recent_write_indices | [1] int64 | first of the S new ones among the recent rows |
| ancestors | [S,A] int64 | with convolutions: recent rows of the last A nodes of the path to each |
| | | node, oldest first, itself not; -1 before the path begins |
| recent_mask | [1,1,S,M] bool | with recurrences: node s sees recent row m, which is of its path |
| | | and after its checkpoint |
| checkpoint_rows | [B,L] int64 | which new rows follow each checkpoint, filled up with any |
| row_places | [S] int64 | where each new row stands in checkpoint_rows, row after row |
| past_key_values.{i}.convolution | [1,1,M,W] | that of layer i, a convolution over the path |
| past_key_values.{i}.recurrent_key | [1,Hk,M,Dk] | that of layer i with a recurrent state |
| past_key_values.{i}.recurrent_delta | [1,H,M,Dv] | |
| past_key_values.{i}.recurrent_decay | [1,H,M,2] | |
| state.{i} | [B,H,Dk,Dv] float32 | the states of the checkpoints; zeros where a path begins |
| state_decay.{i} | [B,H,2] float32 | the decays at them |
| present.{i}.* | as past | the same buffer, updated in place |

In the prune graph recent rows move by src_recent_rows [K] int64 and recent_write_indices.

The fold graph of an engine with recurrences takes folded_rows [T] int64, recent rows of a path in
its order, the recurrent caches, and of the checkpoint before them state.{i} [1,H,Dk,Dv] and
state_decay.{i} [1,H,2]. It returns folded_state.{i} and folded_state_decay.{i}, those of the last
row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import Ints
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.parts.attention.cache_entries import (
    CacheEntry,
    cache_tensors,
    folded_name,
    most_new_rows,
    num_ancestors,
    past_name,
    present_name,
    recent,
    recurrent,
)
from dsbd_runtime.parts.attention.kv_cache import KVCache, row_bytes
from dsbd_runtime.parts.graph_check import call_error
from dsbd_runtime.parts.host_binder import HostBinder
from dsbd_runtime.parts.part import (
    BOOL,
    FLOAT32,
    INT64,
    Call,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    Tensors,
    TensorSpec,
)
from dsbd_runtime.parts.recent.fold_chains import FOLDED_TOGETHER, STAY_RECENT
from dsbd_runtime.parts.recent.recent_paths import NewRows, RecentPaths

FOLD_FILE = "fold.onnx"
ANCESTORS = "ancestors"
RECENT_WRITE_INDICES = "recent_write_indices"
RECENT_MASK = "recent_mask"
CHECKPOINT_ROWS = "checkpoint_rows"
ROW_PLACES = "row_places"
SRC_RECENT_ROWS = "src_recent_rows"
FOLDED_ROWS = "folded_rows"

_STATE_BYTES = 4  # of a number, in fp32
_STEP = 32  # rows; a recurrent layer looks at all of them in every call


def recent_capacity(num_rows: int) -> int:
    """Return the capacity for so many recent rows: 32, 64, 96, ..."""
    return max(1, -(-num_rows // _STEP)) * _STEP


def path_bytes(caches: Sequence[CacheEntry]) -> int:
    """Return the bytes of a path that is kept by itself, in addition to its attention rows.

    They are the states of its checkpoint and the recent rows that usually follow it. A
    request is one such path, and so is each of its beams that has parted from the others for long.
    """
    num_rows = recent_capacity(STAY_RECENT + FOLDED_TOGETHER + 1)
    states = (shape for entry in recurrent(caches) for shape in entry.states.values())
    return num_rows * row_bytes(recent(caches)) + sum(_STATE_BYTES * math.prod(s) for s in states)


@dataclass(frozen=True, kw_only=True)
class RecentEntry(PartEntry):
    """The recent rows in the manifest; ``caches``: of the layers that keep them."""

    caches: Sequence[CacheEntry]
    lacks: ClassVar[str] = "keeps no recent rows"  # ``check_runnable`` refuses it before

    @property
    def files(self) -> tuple[str, ...]:
        return (FOLD_FILE,) if recurrent(self.caches) else ()

    def contract(self) -> GraphContract:
        inputs: Tensors = {RECENT_WRITE_INDICES: TensorSpec(INT64, (1,))}
        if number := num_ancestors(self.caches):
            inputs[ANCESTORS] = TensorSpec(INT64, ("S", number))
        if entries := recurrent(self.caches):
            inputs[RECENT_MASK] = TensorSpec(BOOL, (1, 1, "S", "M"))
            inputs[CHECKPOINT_ROWS] = TensorSpec(INT64, ("B", "L"))
            inputs[ROW_PLACES] = TensorSpec(INT64, ("S",))
            states = (state for entry in entries for state in entry.states.items())
            inputs |= {name: TensorSpec(FLOAT32, ("B", *shape)) for name, shape in states}
        caches = cache_tensors(self.caches, "M")
        return GraphContract(inputs={**inputs, **caches.inputs}, outputs=caches.outputs)

    def on_host(self, place: HostPlace) -> RecentRows:
        return RecentRows(self, HostRecentMemory(self.caches, place))


class RecentRows(Part):
    """The recent rows of an engine, and the checkpoints before them."""

    splits = True
    grows_in_calls = True

    def __init__(self, entry: RecentEntry, memory: HostRecentMemory) -> None:
        self.memory = memory
        self._paths = RecentPaths(memory, num_ancestors(entry.caches))
        self._most_new_rows = most_new_rows(entry.caches, MAX_FORWARD_ROWS)
        self._new: NewRows  # of the call that is bound next

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def calls(self, call: Call) -> Iterator[Call]:
        """Yield the calls of at most ``most_new_rows``, after calls that compute rows again."""
        if call.is_first:
            self._paths.truncate(call.first_row)
        for chunk in call.chunks(self._most_new_rows):
            self._paths.prepare(chunk.forward)
            for again, rows in self._paths.again(chunk.forward, self._most_new_rows):
                yield self._next(Call(again, chunk.first_row), rows)
                self._paths.append(self._new)
                self._paths.prepare(chunk.forward)
            yield self._next(chunk, None)
            self._paths.append(self._new)

    def bind(self, call: Call, binder: HostBinder) -> None:
        self.memory.bind(self._new, binder)

    def keep(self, rows: Ints) -> None:
        self._paths.keep(rows)

    def close(self) -> None:
        self.memory.close()

    def _next(self, call: Call, rows: Ints | None) -> Call:
        self._new = self._paths.new_rows(call.forward, rows)
        return call


class HostRecentMemory:
    """Recent rows of one engine, and the states of checkpoints, (B, H, Dk, Dv); the first is 0."""

    def __init__(self, caches: Sequence[CacheEntry], place: HostPlace) -> None:
        self.rows = KVCache(recent(caches), recent_capacity, place.new_rows)
        self.states: dict[str, NDArray[np.float32]] = {
            name: np.zeros((1, *shape), np.float32)
            for entry in recurrent(caches)
            for name, shape in entry.states.items()
        }
        self._read = [(entry.layer, part) for entry in recurrent(caches) for part in entry.parts]
        self._fold_path = place.folder / FOLD_FILE
        self._fold = place.graphs.open(self._fold_path) if self.states else None

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + sum(state.nbytes for state in self.states.values())

    def reserve(self, num_rows: int, num_used: int) -> None:
        capacity = recent_capacity(num_rows)
        if num_used == 0 or capacity > self.rows.capacity:
            self.rows.resize(capacity, num_used)

    def shrink(self, num_used: int) -> None:
        """See RecentMemory; a little room is left, so that it is not allocated again at once."""
        capacity = recent_capacity(num_used + 2 * _STEP)
        if num_used and capacity < self.rows.capacity:
            self.rows.resize(capacity, num_used)

    def move_rows(self, src_rows: Ints, first_row: int) -> None:
        self.rows.move_rows(src_rows, first_row)

    def reserve_checkpoints(self, number: int) -> None:
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
            remedy = "ask for fewer beams or fewer requests at a time"
            raise call_error(self._fold_path, f"{len(rows)} rows", error, remedy) from error
        for name, state in zip(names, found, strict=True):
            self.states[name][target] = state[0]

    def bind(self, call: NewRows, binder: HostBinder) -> None:
        for key, buffer in self.rows.buffers.items():
            binder.update(past_name(*key), present_name(*key), buffer)
        binder.write({RECENT_WRITE_INDICES: np.array([call.first_row], np.int64)})
        if call.ancestors is not None:
            binder.write({ANCESTORS: call.ancestors})
        if self.states:
            mask = np.zeros((1, 1, len(call.mask), self.rows.capacity), np.bool_)
            mask[0, 0, :, : call.mask.shape[1]] = call.mask
            binder.write({RECENT_MASK: mask, CHECKPOINT_ROWS: call.checkpoint_rows})
            binder.write({ROW_PLACES: call.row_places})
            first, number = call.first_checkpoint, len(call.checkpoint_rows)
            for name, state in self.states.items():
                binder.read(name, state[first : first + number])

    def close(self) -> None:
        self._fold = None
