"""A table model that takes a gather, as an engine with a gather head does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits, GatheredLogits
from dsbd_forward.spec import EngineSpec, HeadSpec
from dsbd_ort.decoding import TableModel
from tests.decoding.tables import LogitsOf


class GatherTable:
    """A TableModel with a gather head.

    Attributes:
        num_pairs: of every forward with a gather.
        num_whole_rows: logit rows that were returned whole.
    """

    def __init__(self, vocab_size: int, logits_of: LogitsOf) -> None:
        self.table = TableModel(vocab_size, logits_of)
        self.spec = EngineSpec(vocab_size=vocab_size, head=HeadSpec(gathers_logits=True))
        self.num_pairs: list[int] = []
        self.num_whole_rows = 0

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    def forward(self, forward: Forward) -> ForwardResult:
        logits = self.table.forward(forward).logits.values
        largest = logits.max(axis=1, initial=-np.inf).astype(np.float64)
        sums = (largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))).astype(np.float32)
        if forward.gather is None:
            self.num_whole_rows += len(logits)
            return ForwardResult(DenseLogits(logits, sums))
        rows, ids = forward.gather
        assert rows.dtype == ids.dtype == np.int64 and rows.shape == ids.shape
        self.num_pairs.append(len(rows))
        return ForwardResult(GatheredLogits(logits[rows, ids], sums))

    def keep(self, rows: NDArray[np.int64]) -> None:
        self.table.keep(rows)
