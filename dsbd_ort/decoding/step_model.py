"""The algorithm's only view of a model: append rows to a cache, get logits, keep some rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StepModel(Protocol):
    """A language model with a key/value cache of rows."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def num_rows(self) -> int:
        """Rows now in the cache."""

    def step(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Append S rows (parents before children) and return the logits of some of them.

        Args:
            token_ids: (S,) int64.
            positions: (S,) int64. Siblings share a position.
            mask: (S, num_rows + S) bool. Row s sees cache row c; its own column is included.
            logit_rows: (R,) int64. Which of the S rows need logits; may be empty.

        Returns:
            (R, vocab_size) float32.
        """

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep these cache rows, (K,) int64 increasing, in this order; drop all others."""
