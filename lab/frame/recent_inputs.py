"""Inputs of engines with convolutions or recurrences, for calls without a decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.parts.cache_entries import num_ancestors, recent, recurrent
from dsbd_runtime.parts.recent_rows import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
)


def recent_inputs(
    entry: ModelEntry, mask: NDArray[np.bool_], ancestors: NDArray[np.int64], first_row: int
) -> dict[str, NDArray[Any]]:
    """Return what an engine is told of recent rows, all behind the beginning of their paths.

    mask: (S, M) bool, of the recent rows. ancestors: (S, A) int64. first_row: of the new ones.
    """
    if not recent(entry.caches):
        return {}
    inputs: dict[str, NDArray[Any]] = {RECENT_WRITE_INDICES: np.array([first_row])}
    if num_ancestors(entry.caches):
        inputs[ANCESTORS] = ancestors
    if entries := recurrent(entry.caches):
        inputs[RECENT_MASK] = mask[None, None]
        inputs[CHECKPOINT_ROWS] = np.arange(len(mask))[None]
        inputs[ROW_PLACES] = np.arange(len(mask))
        states = (state for each in entries for state in each.states.items())
        inputs |= {name: np.zeros((1, *shape), np.float32) for name, shape in states}
    return inputs
