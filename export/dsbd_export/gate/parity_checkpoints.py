"""Recent rows of the parity engine: one checkpoint beside another one that is noise.

Row c of the cache is row c + 3 of the recent ones, so that neither can stand for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.parts.cache_entries import (
    RECURRENT_DECAY,
    RECURRENT_DELTA,
    RECURRENT_KEY,
    CacheEntry,
    folded_name,
    num_ancestors,
    past_name,
    recurrent,
)
from dsbd_runtime.parts.recent_rows import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    FOLDED_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
)

_SHIFT = 3
_LEFT_ROWS = 16  # of a prefix are not folded
_FEWEST_FOLDED = 32


class ParityCheckpoint:
    """The checkpoint that all paths of a case are behind.

    Attributes:
        capacity: of the recent rows.
        num_ancestors: of a convolution.
        folded_names: outputs of the fold graph.
    """

    def __init__(self, caches: Sequence[CacheEntry], capacity: int) -> None:
        self.capacity = capacity + _SHIFT
        self.num_ancestors = num_ancestors(caches)
        rng = np.random.default_rng(1)
        self._states: dict[str, NDArray[np.float32]] = {
            name: rng.standard_normal((2, *shape), dtype=np.float32)
            for entry in recurrent(caches)
            for name, shape in entry.states.items()
        }
        self._recurrent_names = [
            past_name(entry.layer, part)
            for entry in recurrent(caches)
            for part in (RECURRENT_KEY, RECURRENT_DELTA, RECURRENT_DECAY)
        ]
        self.folded_names = [folded_name(name) for name in self._states]
        self._num_folded = 0

    def begin(self) -> None:
        """Be where paths begin."""
        self._num_folded = 0
        for state in self._states.values():
            state[1] = 0

    def rows_to_fold(self, num_prefix: int) -> NDArray[np.int64]:
        """Return the recent rows of a prefix that are folded, none of a short one."""
        num_folded = num_prefix - _LEFT_ROWS
        return np.arange(num_folded if num_folded >= _FEWEST_FOLDED else 0) + _SHIFT

    def fold_inputs(
        self, rows: NDArray[np.int64], recent_rows: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Return the inputs of the fold graph; from now on these rows are folded."""
        self._num_folded = len(rows)
        return {
            FOLDED_ROWS: rows,
            **{name: recent_rows[name] for name in self._recurrent_names},
            **{name: state[1:] for name, state in self._states.items()},
        }

    def take(self, folded: list[NDArray[np.float32]]) -> None:
        """Be what the fold graph has returned."""
        for state, found in zip(self._states.values(), folded, strict=True):
            state[1:] = found

    def inputs(
        self, visible: NDArray[np.bool_], above: NDArray[np.int64], first_row: int
    ) -> dict[str, NDArray[Any]]:
        """Return the inputs of a call for rows from ``first_row`` on, (S, C) and (S, A)."""
        num_new = len(visible)
        inputs: dict[str, NDArray[Any]] = {
            RECENT_WRITE_INDICES: np.array([first_row + _SHIFT], np.int64)
        }
        if self.num_ancestors:
            inputs[ANCESTORS] = np.where(above < 0, above, above + _SHIFT)
        if self._states:
            mask = np.zeros((num_new, self.capacity), np.bool_)
            mask[:, _SHIFT:] = visible
            mask[:, : _SHIFT + self._num_folded] = False
            rows = np.arange(num_new)
            inputs[RECENT_MASK] = mask[None, None]
            inputs[CHECKPOINT_ROWS] = np.stack([np.zeros_like(rows), rows])
            inputs[ROW_PLACES] = num_new + rows
        return {**inputs, **self._states}
