"""A table model that returns candidates, as an engine with a top-k head does."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import TopLogits
from dsbd_forward.spec import EngineSpec, HeadSpec
from dsbd_ort.decoding import TableModel
from tests.decoding.tables import LogitsOf


class TopTable:
    """The ``num_top_logits`` largest logits of a TableModel.

    Attributes:
        first_full_row: None without full logits; else those of a forward can be read from this row
            on, or from R if it has fewer rows.
        full_chunk: instead: those of the last so many rows or fewer, as an engine that splits a
            forward into calls of this size keeps them.
        rows_read: the rows of every read of full logits.
    """

    def __init__(
        self,
        vocab_size: int,
        logits_of: LogitsOf,
        num_top_logits: int,
        first_full_row: int | None = None,
        full_chunk: int = 0,
    ) -> None:
        self.table = TableModel(vocab_size, logits_of)
        self.spec = EngineSpec(
            vocab_size=vocab_size,
            head=HeadSpec(
                num_top_logits=num_top_logits,
                keeps_full_logits=first_full_row is not None or full_chunk > 0,
            ),
        )
        self.first_full_row = first_full_row
        self.full_chunk = full_chunk
        self.rows_read: list[list[int]] = []
        self._full: TableFull | None = None

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    def forward(self, forward: Forward) -> ForwardResult:
        logits = self.table.forward(forward).logits.values
        top = candidates_of(logits, self.spec.head.num_top_logits)
        if not self.spec.head.keeps_full_logits:
            return ForwardResult(top)
        first_row = self.first_full_row or 0
        if self.full_chunk:
            last_call = (forward.num_new - 1) // self.full_chunk * self.full_chunk
            first_row = int((forward.logit_rows < last_call).sum())
        if self._full is not None:
            self._full.logits = None
        self._full = TableFull(logits, min(first_row, len(logits)), self.rows_read)
        return ForwardResult(dataclasses.replace(top, kept=self._full))

    def keep(self, rows: NDArray[np.int64]) -> None:
        self.table.keep(rows)


class TableFull:
    """The full logits of a forward of a TopTable, until its next one."""

    def __init__(
        self, logits: NDArray[np.float32], first_row: int, rows_read: list[list[int]]
    ) -> None:
        self.logits: NDArray[np.float32] | None = logits
        self.first_row = first_row
        self._rows_read = rows_read

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        assert self.logits is not None, "read after the next forward"
        assert rows.dtype == np.int64 and rows.ndim == 1
        assert ((self.first_row <= rows) & (rows < len(self.logits))).all(), (rows, self.first_row)
        self._rows_read.append(rows.tolist())
        return self.logits[rows]


def candidates_of(logits: NDArray[np.float32], num_candidates: int) -> TopLogits:
    """Output of a top-k head for (R, vocab_size) logits."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
    largest = logits.max(axis=1).astype(np.float64)
    sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return TopLogits(ids, np.take_along_axis(logits, ids, axis=1), sums.astype(np.float32))
