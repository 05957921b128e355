"""Recent rows: the rows that convolutions and recurrences keep, and the states of checkpoints.

| tensor | shape, type | meaning |
|---|---|---|
| recent_write_indices | [1] int64 | recent row of the first of the S new rows |
| ancestors | [S,A] int64 | with convolutions: recent rows of the last A nodes on the path to each |
| | | node, oldest first, without the node; -1 before the path begins |
| recent_mask | [1,1,S,M] bool | with recurrences: node s sees recent row m, which is on its path |
| | | and after its checkpoint |
| checkpoint_rows | [B,L] int64 | which new rows follow each checkpoint, filled up with any rows |
| row_places | [S] int64 | index of each new row in checkpoint_rows, read row after row |
| past_key_values.{i}.convolution | [1,1,M,W] | layer i, a convolution over the path |
| past_key_values.{i}.recurrent_key | [1,Hk,M,Dk] | layer i with a recurrent state |
| past_key_values.{i}.recurrent_delta | [1,H,M,Dv] | |
| past_key_values.{i}.recurrent_decay | [1,H,M,2] | |
| state.{i} | [B,H,Dk,Dv] float32 | the states of the checkpoints; zeros where a path begins |
| state_decay.{i} | [B,H,2] float32 | the decays at the checkpoints |
| present.{i}.* | as past | the same buffer, updated in place |

The prune graph moves the recent rows src_recent_rows [K] int64 to recent_write_indices.

The fold graph of an engine with recurrences reads folded_rows [T] int64, which are recent rows of
a path in its order, the recurrent caches, and state.{i} [1,H,Dk,Dv] and state_decay.{i} [1,H,2] of
the checkpoint before these rows. It returns state and decay after the last row: folded_state.{i}
and folded_state_decay.{i}.
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

_STATE_BYTES = 4  # bytes of a number, fp32
_STEP = 32  # rows; a recurrent layer looks at all of them in every call


def recent_capacity(num_rows: int) -> int:
    """Return the capacity for ``num_rows`` recent rows: 32, 64, 96, ..."""
    return max(1, -(-num_rows // _STEP)) * _STEP


def path_bytes(caches: Sequence[CacheEntry]) -> int:
    """Return the bytes of a path that is kept by itself, in addition to its attention rows.

    They are the states of its checkpoint and the recent rows that usually follow it. A request is
    one such path. So is each of its beams that branched off from the others many rows ago.
    """
    num_rows = recent_capacity(STAY_RECENT + FOLDED_TOGETHER + 1)
    states = (shape for entry in recurrent(caches) for shape in entry.states.values())
    return num_rows * row_bytes(recent(caches)) + sum(_STATE_BYTES * math.prod(s) for s in states)


@dataclass(frozen=True, kw_only=True)
class RecentEntry(PartEntry):
    """The recent rows in the manifest; ``caches``: entries of the layers that keep them."""

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
        self._new: NewRows  # rows of the call that is bound next

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def calls(self, call: Call) -> Iterator[Call]:
        """Yield calls of at most ``most_new_rows`` rows, after calls that compute rows again."""
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
        """See RecentMemory; a little room stays, so that the next call need not allocate it."""
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
            states = self._fold.run([folded_name(name) for name in names], inputs)
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            remedy = "ask for fewer beams or fewer requests at a time"
            raise call_error(self._fold_path, f"{len(rows)} rows", error, remedy) from error
        for name, state in zip(names, states, strict=True):
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
