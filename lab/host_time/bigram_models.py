"""Engines replaced by tables: next-token logits that depend on the last token alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.graph import TopLogits

NUM_STATES = 512
SPREAD = 2.5  # standard deviation of the logits: some 20 tokens have most of the probability


def random_pair(vocab_size: int, closeness: float) -> tuple[NDArray[np.float32], ...]:
    """Return the logits of a target and of a draft, (NUM_STATES, vocab_size) float32 each.

    The draft's are ``closeness`` of the target's and the rest its own.
    """
    rng = np.random.default_rng(0)
    target, noise = (SPREAD * rng.normal(size=(2, NUM_STATES, vocab_size))).astype(np.float32)
    return target, closeness * target + (1.0 - closeness) * noise


class DenseBigram:
    """A StepModel that returns all logits; its cache is a number of rows."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.vocab_size = logits.shape[1]
        self.num_rows = 0
        self._logits = logits

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """See StepModel.forward."""
        self.num_rows += len(token_ids)
        return self._logits[token_ids[logit_rows] % NUM_STATES]

    def keep(self, rows: NDArray[np.int64]) -> None:
        """See StepModel.keep."""
        self.num_rows = len(rows)


class TopKBigram(DenseBigram):
    """The same with a top-k head: a model that returns TopLogits."""

    def __init__(self, logits: NDArray[np.float32], num_top_logits: int) -> None:
        super().__init__(logits)
        self.num_top_logits = num_top_logits
        self._ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_top_logits]
        self._top = np.take_along_axis(logits, self._ids, axis=1)
        self._sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1)).astype(np.float32)

    def forward(  # type: ignore[override]
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> TopLogits:
        """See StepModel.forward."""
        self.num_rows += len(token_ids)
        states = token_ids[logit_rows] % NUM_STATES
        return TopLogits(self._ids[states], self._top[states], self._sums[states], None)
