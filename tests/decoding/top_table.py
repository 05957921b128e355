"""A table model that returns candidates, as an engine with a top-k head does."""

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
        rows_read: the rows of every read of full logits.
        num_tokens_read: logits that were read one by one.
    """

    def __init__(
        self,
        vocab_size: int,
        logits_of: LogitsOf,
        num_top_logits: int,
        *,
        keeps_full: bool = False,
    ) -> None:
        self.table = TableModel(vocab_size, logits_of)
        self.spec = EngineSpec(
            vocab_size=vocab_size,
            head=HeadSpec(num_top_logits=num_top_logits, keeps_full_logits=keeps_full),
        )
        self.rows_read: list[list[int]] = []
        self.num_tokens_read = 0
        self._full: TableFull | None = None

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    def forward(self, forward: Forward) -> ForwardResult:
        logits = self.table.forward(forward).logits.values
        top = candidates_of(logits, self.spec.head.num_top_logits)
        if not self.spec.head.keeps_full_logits:
            return ForwardResult(top)
        if self._full is not None:
            self._full.logits = None
        self._full = TableFull(logits, self)
        return ForwardResult(dataclasses.replace(top, kept=self._full))

    def keep(self, rows: NDArray[np.int64]) -> None:
        self.table.keep(rows)


class TableFull:
    """The full logits of a forward of a TopTable, until its next one."""

    def __init__(self, logits: NDArray[np.float32], table: TopTable) -> None:
        self.logits: NDArray[np.float32] | None = logits
        self._table = table

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        found = self._checked(rows)[rows]
        self._table.rows_read.append(rows.tolist())
        return found

    def read_tokens(
        self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        found = self._checked(rows)[rows, token_ids]
        self._table.num_tokens_read += len(rows)
        return found

    def _checked(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        assert self.logits is not None, "read after the next forward"
        assert rows.dtype == np.int64 and rows.ndim == 1
        assert ((rows >= 0) & (rows < len(self.logits))).all(), rows
        return self.logits


def candidates_of(logits: NDArray[np.float32], num_candidates: int) -> TopLogits:
    """Output of a top-k head for (R, vocab_size) logits."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
    largest = logits.max(axis=1).astype(np.float64)
    sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return TopLogits(ids, np.take_along_axis(logits, ids, axis=1), sums.astype(np.float32))
