"""A StepModel whose logits come from a function of the path: for tests and for trying things."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]


class TableModel:
    """A model given by its next-token logits for every path of tokens.

    It keeps what a cache keeps (one row per computed node) and finds each node's path through the
    mask, so a wrong mask, row or position gives wrong logits, as with a real engine.
    """

    def __init__(self, vocab_size: int, logits_of: Callable[[Path], NDArray[np.floating]]) -> None:
        """Take the table: ``logits_of(path)`` returns (vocab_size,) logits after ``path``."""
        self.vocab_size = vocab_size
        self._logits_of = logits_of
        self._tokens = np.zeros(0, dtype=np.int64)
        self._positions = np.zeros(0, dtype=np.int64)
        self.computed_paths: list[Path] = []

    @property
    def num_rows(self) -> int:
        """Rows now in the cache."""
        return len(self._tokens)

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """See StepModel.forward.

        Raises:
            ValueError: the rows a node sees are not exactly the positions 0 to its own.
        """
        if mask.shape != (len(token_ids), self.num_rows + len(token_ids)):
            raise ValueError(f"mask has shape {mask.shape}")
        self._tokens = np.concatenate([self._tokens, token_ids])
        self._positions = np.concatenate([self._positions, positions])
        paths = [self._path(mask[s], position) for s, position in enumerate(positions)]
        self.computed_paths += paths
        rows = [np.asarray(self._logits_of(paths[s]), dtype=np.float32) for s in logit_rows]
        return np.array(rows, dtype=np.float32).reshape(len(logit_rows), self.vocab_size)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """See StepModel.keep."""
        if (np.diff(rows) <= 0).any():
            raise ValueError(f"rows {rows} are not increasing")
        self._tokens, self._positions = self._tokens[rows], self._positions[rows]

    def _path(self, seen: NDArray[np.bool_], position: np.int64) -> Path:
        order = np.argsort(self._positions[seen])
        if not np.array_equal(self._positions[seen][order], np.arange(position + 1)):
            raise ValueError(f"a node at position {position} sees {self._positions[seen]}")
        return tuple(self._tokens[seen][order].tolist())
