"""The engine's masks of one call: the forest's mask padded to the capacity, and its window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.graph import ATTENTION_MASK, ATTENTION_MASK_SLIDING


class StepMasks:
    """Builds masks in buffers [max_rows, capacity] that every call reuses.

    ``names`` and ``sliding_window`` are those of the manifest: the window is a number exactly
    when the names hold the sliding mask.
    """

    def __init__(self, names: list[str], sliding_window: int | None, max_rows: int) -> None:
        self._names = names
        self._sliding_window = sliding_window
        self._max_rows = max_rows
        self._buffers: dict[str, NDArray[np.bool_]] = {}

    def padded(
        self,
        mask: NDArray[np.bool_],
        positions: NDArray[np.int64],
        row_positions: NDArray[np.int64],
        capacity: int,
    ) -> dict[str, NDArray[np.bool_]]:
        """Return the masks by input name, (S, capacity) each; valid until the next call.

        With a window of 2, positions [5] and row_positions [3, 4, 4, 5], the mask
        [[1, 1, 0, 1]] becomes [[1, 1, 0, 1, 0, ...]] and, sliding, [[0, 1, 0, 1, 0, ...]].

        Args:
            mask: (S, N) bool. Row s sees cache row c.
            positions: (S,) int64. Positions of the S rows.
            row_positions: (N,) int64. Positions of the cache rows, the S new ones included.
            capacity: rows of the caches, at least N.
        """
        num_new, num_rows = mask.shape
        masks = {name: self._buffer(name, capacity)[:num_new] for name in self._names}
        for padded in masks.values():
            padded[:, num_rows:] = False
        if ATTENTION_MASK in masks:
            masks[ATTENTION_MASK][:, :num_rows] = mask
        if self._sliding_window is not None:
            # positions - row_positions < window, with the small side of the subtraction first
            in_window = row_positions > (positions - self._sliding_window)[:, None]
            np.logical_and(mask, in_window, out=masks[ATTENTION_MASK_SLIDING][:, :num_rows])
        return masks

    def _buffer(self, name: str, capacity: int) -> NDArray[np.bool_]:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[1] != capacity:
            buffer = self._buffers[name] = np.empty((self._max_rows, capacity), np.bool_)
        return buffer
