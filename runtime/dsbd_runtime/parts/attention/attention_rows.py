"""Attention rows: the key/value cache that every node adds a row to, and the masks over it.

Every engine has this part: it also carries the rows' ids and positions.

| tensor | shape, type | meaning |
|---|---|---|
| input_ids, position_ids | [1,S] int64 | the nodes; siblings share a position |
| attention_mask | [1,1,S,C] bool | node s sees cache row c; nothing else masks |
| attention_mask_sliding | [1,1,S,C] bool | the same cut to the window, for sliding-window layers |
| write_indices | [1] int64 | first cache row of the S new rows |
| row_positions | [C] int64 | with a bias by distance: positions of all rows of the cache; any |
| | | number for rows that no node sees |
| past_key_values.{i}.key | [1,Hkv,C,Dk] | the external cache of layer i that attends |
| past_key_values.{i}.value | [1,Hkv,C,Dv] | |
| present.{i}.* | as past | the same buffer, updated in place |

The prune graph takes src_rows [K] int64, write_indices [1] int64 and the caches; row
write_indices + k becomes the old row src_rows[k].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_forward.rows import Ints
from dsbd_runtime.parts.attention.cache_entries import CacheEntry, cache_tensors
from dsbd_runtime.parts.attention.kv_cache import HostRows
from dsbd_runtime.parts.device_binder import StagedCall
from dsbd_runtime.parts.host_binder import HostBinder
from dsbd_runtime.parts.part import (
    BOOL,
    INT64,
    Call,
    DevicePlace,
    GraphContract,
    HostPlace,
    Part,
    PartEntry,
    TensorSpec,
)

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
ATTENTION_MASK = "attention_mask"
ATTENTION_MASK_SLIDING = "attention_mask_sliding"
WRITE_INDICES = "write_indices"
ROW_POSITIONS = "row_positions"
SRC_ROWS = "src_rows"

MAX_FORWARD_ROWS = 256
"""The most rows of one engine call; longer forwards run in chunks."""


class RowMemory(Protocol):
    """The key/value caches of one engine."""

    @property
    def capacity(self) -> int:
        """Rows that the caches hold now; 0 after ``close``."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the caches take now."""

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Make room for at least ``num_rows`` rows in the caches and keep the first ``num_used``.

        With ``num_used`` 0 they start again: all zero, in the smallest sufficient capacity.
        Otherwise they only grow. When it raises, the used rows are as before.
        """

    def shrink(self, num_used: int) -> None:
        """Give the caches the smallest capacity for their first ``num_used`` rows, which stay."""

    def bind(self, binder: Any) -> None:
        """Bind the caches as both input and output, if they are not bound."""

    def move_rows(self, src_rows: Ints, first_row: int) -> None:
        """Copy the rows ``src_rows`` (K,) to ``first_row .. first_row + K - 1``, as if at once."""

    def close(self) -> None:
        """Release the caches; calling it again does nothing."""


@dataclass(frozen=True, kw_only=True)
class AttentionEntry(PartEntry):
    """The attention rows in the manifest.

    caches: keys and values of the layers that attend.
    masks: names of the mask inputs.
    sliding_window: positions that a sliding-window layer sees; None exactly when ``masks`` lacks
        the sliding one.
    reads_positions: whether the graph has the input ``row_positions``.
    """

    caches: Sequence[CacheEntry]
    masks: Sequence[str]
    sliding_window: int | None = None
    reads_positions: bool = False

    def contract(self) -> GraphContract:
        inputs = {
            **dict.fromkeys((INPUT_IDS, POSITION_IDS), TensorSpec(INT64, (1, "S"))),
            **{mask: TensorSpec(BOOL, (1, 1, "S", "C")) for mask in self.masks},
            WRITE_INDICES: TensorSpec(INT64, (1,)),
        }
        if self.reads_positions:
            inputs[ROW_POSITIONS] = TensorSpec(INT64, ("C",))
        caches = cache_tensors(self.caches, "C")
        return GraphContract(inputs={**inputs, **caches.inputs}, outputs=caches.outputs)

    def on_host(self, place: HostPlace) -> Rows:
        return Rows(self, HostRows(self.caches, place))

    def on_device(self, place: DevicePlace) -> Rows:
        return Rows(self, place.rows)


class Rows(Part):
    """The rows of an engine's cache, their positions, and the masks over them."""

    def __init__(self, entry: AttentionEntry, memory: RowMemory) -> None:
        self.memory = memory
        self.capacity = memory.capacity
        self._reads_positions = entry.reads_positions
        self._mask_names, self._sliding_window = entry.masks, entry.sliding_window
        # (capacity,); only those of the present rows are valid
        self._positions = np.zeros(memory.capacity, np.int64)

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def bind(self, call: Call, binder: HostBinder | StagedCall) -> None:
        forward, first, stop = call.forward, call.first_row, call.stop
        self._positions[first:stop] = forward.positions
        arrays: dict[str, NDArray[Any]] = {
            INPUT_IDS: forward.token_ids[None],  # (1, S)
            POSITION_IDS: forward.positions[None],
            WRITE_INDICES: np.array([first], np.int64),
        }
        if self._reads_positions:
            arrays[ROW_POSITIONS] = self._positions
        binder.write(arrays)
        for name in self._mask_names:
            shape = 1, 1, call.num_new, self.capacity
            self._fill(name, binder.room(name, shape, np.bool_)[0, 0], forward)
        if binder.is_cleared:
            self.memory.bind(binder)

    def reserve(self, num_rows: int, num_used: int) -> None:
        self.memory.reserve(num_rows, num_used)
        self._fit_positions(num_used)

    def shrink(self, num_used: int) -> None:
        self.memory.shrink(num_used)
        self._fit_positions(num_used)

    def keep(self, rows: Ints) -> None:
        """See Part. Rows before the first gap stay: with [0, 1, 4, 6] rows 4 and 6 move to 2, 3."""
        num_kept, first = len(rows), num_in_place(rows)
        if first < num_kept:
            moved = rows[first:]
            self.memory.move_rows(moved, first)
            self._positions[first:num_kept] = self._positions[moved]

    def close(self) -> None:
        self.memory.close()
        self.capacity = 0

    def _fill(self, name: str, mask: NDArray[np.bool_], forward: Forward) -> None:
        """Fill one mask of a forward, (S, capacity), after the rows' positions have been written.

        With positions [5], a window of 2 and row positions [3, 4, 4, 5], the forward's mask
        [[1, 1, 0, 1]] becomes [[1, 1, 0, 1, 0, ...]]. The sliding mask is [[0, 1, 0, 1, 0, ...]].
        """
        num_rows = forward.mask.shape[1]  # N
        mask[:, num_rows:] = False
        mask[:, :num_rows] = forward.mask
        if name == ATTENTION_MASK_SLIDING and self._sliding_window is not None:
            # positions - row_positions < window, with the small side of the subtraction first
            first = (forward.positions - self._sliding_window)[:, None]
            mask[:, :num_rows] &= self._positions[:num_rows] > first

    def _fit_positions(self, num_used: int) -> None:
        self.capacity = self.memory.capacity
        if self.capacity != len(self._positions):
            positions = np.zeros(self.capacity, np.int64)
            positions[:num_used] = self._positions[:num_used]
            self._positions = positions


def num_in_place(rows: Ints) -> int:
    """Return how many of the kept rows need not move: 2 for [0, 1, 4, 6]."""
    return int(np.count_nonzero(rows == np.arange(len(rows))))


def places_of_rows(items: Ints, num_items: int) -> tuple[Ints, Ints]:
    """Return the rows of each item, (B, P), and the index of each row in them, (S,).

    With the items [1, 0, 1] of two, the rows are [[1, 0], [0, 2]] and the places [2, 0, 3]. The
    second number in [1, 0] is padding.

    items: (S,) int64, which of the B items each row reads.
    """
    num_rows = len(items)
    if num_items == 1:
        rows = np.arange(num_rows)
        return rows[None], rows
    counts = np.bincount(items, minlength=num_items)
    num_places = int(counts.max())
    order = items.argsort(kind="stable")
    begins = counts.cumsum() - counts
    places = np.empty(num_rows, np.int64)
    of_item = items[order]
    places[order] = of_item * num_places + np.arange(num_rows) - begins[of_item]
    filled = np.zeros(num_items * num_places, np.int64)
    filled[places] = np.arange(num_rows)
    return filled.reshape(num_items, num_places), places
