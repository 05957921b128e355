"""The algorithm's only view of a model: append rows to a cache, get logits, keep some rows.

A model may return the largest logits of a row instead of all: the second method, for engines that
keep the vocabulary off the host. Dense logits stay the meaning.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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


class Candidates(Protocol):
    """The K largest logits of each of R rows, by decreasing logit, ties by increasing id."""

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """(R, K) int64. Their tokens."""

    @property
    def top_logits(self) -> NDArray[np.float32]:
        """(R, K) float32."""

    @property
    def logsumexp(self) -> NDArray[np.float32]:
        """(R,) float32. Log of the sum of exp(logit) over the whole vocabulary."""


@runtime_checkable
class CandidateModel(StepModel, Protocol):
    """A model that may return candidates; where ``num_candidates`` is not 0, only those."""

    @property
    def num_candidates(self) -> int:
        """K, or 0 where ``step`` returns all logits."""

    def step_candidates(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> Candidates:
        """Append S rows as ``step`` does; return the K largest logits of the R asked ones."""


def candidate_model(model: StepModel) -> CandidateModel | None:
    """Return the model as one that returns candidates, None if it returns all logits."""
    return model if isinstance(model, CandidateModel) and model.num_candidates else None
