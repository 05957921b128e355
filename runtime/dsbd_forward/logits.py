"""Logits that a forward returns of R rows: all of each, the largest of each, or those of pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.errors import ModelError

Ints = NDArray[np.int64]
Float32s = NDArray[np.float32]


class Gather(NamedTuple):
    """Which logits a gather head returns: (row, token) pairs, in any order.

    Attributes:
        rows: (N,) int64. Index of each one's row among the R logit rows.
        token_ids: (N,) int64.
    """

    rows: Ints
    token_ids: Ints


class FullLogits(Protocol):
    """All logits of the R rows of a forward, which stay with the engine until they are read."""

    @property
    def first_row(self) -> int:
        """First of the R rows that can be read, R if none can.

        A forward of many rows may run in several calls; only the rows of the last call can be read.
        """

    def read(self, rows: Ints) -> Float32s:
        """Return a copy of the logits of some rows, (n, vocab_size) float32.

        rows: (n,) int64, ``first_row`` to R - 1, in any order, also repeated.

        Valid until the model's next forward or its end; raises after that.
        """


class Logits(ABC):
    """The logits of the R rows of a forward, by what the engine's head returns."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return R."""

    @abstractmethod
    def part(self, rows: slice, pairs: slice) -> Logits:
        """Return those of some neighbouring rows, and of pairs where the engine gathers."""

    @property
    @abstractmethod
    def full(self) -> FullLogits | None:
        """All logits of the rows; None where they cannot be read."""


@dataclass(frozen=True, slots=True)
class DenseLogits(Logits):
    """All logits of each row.

    Attributes:
        values: (R, vocab_size) float32.
    """

    values: Float32s

    def __len__(self) -> int:
        return len(self.values)

    def part(self, rows: slice, pairs: slice) -> DenseLogits:
        """See Logits."""
        return DenseLogits(self.values[rows])

    @property
    def full(self) -> FullLogits:
        """See Logits."""
        return self

    @property
    def first_row(self) -> int:
        """See FullLogits."""
        return 0

    def read(self, rows: Ints) -> Float32s:
        """See FullLogits."""
        return self.values[rows]


@dataclass(frozen=True, slots=True)
class TopLogits(Logits):
    """The K largest logits of each row, by decreasing logit, ties by increasing id.

    Attributes:
        top_ids: (R, K) int64. Their tokens.
        top_logits: (R, K) float32.
        logsumexp: (R,) float32. Log of the sum of exp(logit) over the whole vocabulary.
        kept: all logits of the rows; None where the engine does not keep them.
    """

    top_ids: Ints
    top_logits: Float32s
    logsumexp: Float32s
    kept: FullLogits | None = None

    def __len__(self) -> int:
        return len(self.top_ids)

    def part(self, rows: slice, pairs: slice) -> TopLogits:
        """See Logits."""
        kept = None if self.kept is None else FullLogitsPart(self.kept, rows.start, rows.stop)
        return TopLogits(self.top_ids[rows], self.top_logits[rows], self.logsumexp[rows], kept)

    @property
    def full(self) -> FullLogits | None:
        """See Logits."""
        return self.kept


@dataclass(frozen=True, slots=True)
class GatheredLogits(Logits):
    """The logits of the pairs of a ``Gather``: log p of pair n is values[n] - logsumexp[rows[n]].

    Attributes:
        values: (N,) float32. In the order of the pairs.
        logsumexp: (R,) float32. Log of the sum of exp(logit) over the whole vocabulary.
    """

    values: Float32s
    logsumexp: Float32s

    def __len__(self) -> int:
        return len(self.logsumexp)

    def part(self, rows: slice, pairs: slice) -> GatheredLogits:
        """See Logits."""
        return GatheredLogits(self.values[pairs], self.logsumexp[rows])

    @property
    def full(self) -> None:
        """See Logits."""
        return None


class FullLogitsPart:
    """The ``FullLogits`` of one request's rows of a shared forward.

    Attributes:
        first_row: first of them that can be read.
    """

    def __init__(self, full: FullLogits, begin: int, end: int) -> None:
        """Take rows ``begin`` to ``end - 1`` of a forward, which become 0, 1, ..."""
        self._full = full
        self._begin = begin
        self._num_rows = end - begin
        self.first_row = min(max(full.first_row - begin, 0), self._num_rows)

    def read(self, rows: Ints) -> Float32s:
        """See FullLogits; other rows would be those of another request."""
        if ((rows < self.first_row) | (rows >= self._num_rows)).any():
            raise ModelError(
                f"full logits of rows {rows.tolist()} are read, expected rows {self.first_row} to "
                f"{self._num_rows - 1} of the call; read those of its own rows"
            )
        return self._full.read(rows + self._begin)
