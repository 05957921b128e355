"""A table model that returns candidates, as an engine with a top-k head does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import TableModel
from tests.decoding.tables import LogitsOf


class TableTop(NamedTuple):
    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]


class TopTable:
    """The ``num_top_logits`` largest logits of a TableModel."""

    def __init__(self, vocab_size: int, logits_of: LogitsOf, num_top_logits: int) -> None:
        self.table = TableModel(vocab_size, logits_of)
        self.vocab_size = vocab_size
        self.num_top_logits = num_top_logits

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> TableTop:
        return candidates_of(
            self.table.forward(token_ids, positions, mask, logit_rows), self.num_top_logits
        )

    def keep(self, rows: NDArray[np.int64]) -> None:
        self.table.keep(rows)


def candidates_of(logits: NDArray[np.float32], num_candidates: int) -> TableTop:
    """What a top-k head makes of (R, vocab_size) logits."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
    largest = logits.max(axis=1).astype(np.float64)
    sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return TableTop(ids, np.take_along_axis(logits, ids, axis=1), sums.astype(np.float32))
