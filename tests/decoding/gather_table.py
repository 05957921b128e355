"""A table model that takes a gather, as an engine with a gather head does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import TableModel
from tests.decoding.tables import LogitsOf


@dataclass(frozen=True)
class TableGathered:
    """Logits of pairs or of whole rows, and the sums of the rows."""

    logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]


class GatherTable:
    """A TableModel with ``gathers_logits``.

    Attributes:
        num_pairs: of every forward with a gather.
        num_whole_rows: logit rows that were returned whole.
    """

    gathers_logits = True

    def __init__(self, vocab_size: int, logits_of: LogitsOf) -> None:
        self.table = TableModel(vocab_size, logits_of)
        self.vocab_size = vocab_size
        self.num_pairs: list[int] = []
        self.num_whole_rows = 0

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        gather: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> TableGathered:
        logits = self.table.forward(token_ids, positions, mask, logit_rows)
        largest = logits.max(axis=1, initial=-np.inf).astype(np.float64)
        sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        if gather is None:
            self.num_whole_rows += len(logits)
            return TableGathered(logits, sums.astype(np.float32))
        rows, ids = gather
        assert rows.dtype == ids.dtype == np.int64 and rows.shape == ids.shape
        self.num_pairs.append(len(rows))
        return TableGathered(logits[rows, ids], sums.astype(np.float32))

    def keep(self, rows: NDArray[np.int64]) -> None:
        self.table.keep(rows)
