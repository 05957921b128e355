"""Logits that a forward returns of R rows: all of each, the largest of each, or those of pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.errors import ModelError
from dsbd_forward.rows import Floats, Ints, added_up, finite, largest_logits
from dsbd_forward.spec import EngineSpec

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
    """The logits of the R rows of a forward, by what the engine's head returns.

    The raw log-probability of a token is its logit less the row's log-normalizer, in float64. That
    one is what the engine returns with the row where its head adds up (``logsumexp``), and is added
    up here where it does not. Which of the two is the engine's, never the call's: a log-probability
    is a function of the path alone, and so does not show who drafted, how wide, or which rows were
    read again.

    Attributes:
        logsumexp: (R,) float32. Log of the sum of exp(logit) of a row over the whole vocabulary, as
            the engine returns it; None where it does not.
    """

    __slots__ = ()

    logsumexp: Float32s | None

    @abstractmethod
    def __len__(self) -> int:
        """Return R."""

    @abstractmethod
    def part(self, rows: slice, pairs: slice) -> Logits:
        """Return those of some neighbouring rows, and of pairs where the engine gathers."""

    @abstractmethod
    def check(self, spec: EngineSpec, num_rows: int, num_pairs: int) -> None:
        """Raise ModelError unless these are logits of so many rows, and pairs, of an engine."""

    @property
    def whole(self) -> Float32s | None:
        """All logits of every row, (R, vocab_size); None where they were not returned."""
        return None

    @property
    def gathered(self) -> Float32s | None:
        """The logits of the pairs of a ``Gather``, (N,), finite or -inf; None without one.

        Raises:
            ModelError: one is NaN or +inf.
        """
        return None

    @property
    def full(self) -> FullLogits | None:
        """All logits of the rows; None where they cannot be read."""
        return None

    @property
    def log_normalizers(self) -> Floats:
        """Log of the sum of exp(logit) over the vocabulary of every row, (R, 1) float64.

        Raises:
            ModelError: a row without a finite one.
        """
        if self.logsumexp is None:
            assert self.whole is not None  # a head that adds nothing up returns all of a row
            return added_up(self.whole)
        column: Floats = finite(self.logsumexp).astype(np.float64)[:, None]
        return column

    def most_probable(self, number: int) -> tuple[Ints, Floats]:
        """Return the most probable tokens of every row, at most ``number``; 0: all that are known.

        Returns:
            tokens (R, n) int64 by decreasing logit, ties by increasing id, and their logits, (R, n)
            float64.

        Raises:
            ModelError: NaN, an infinite first logit, or a larger one behind the first.
        """
        raise ModelError(
            f"the most probable tokens of a row are wanted, but the engine returned "
            f"{type(self).__name__}; call it without a gather"
        )

    def read(self, rows: Ints) -> tuple[Float32s, Floats]:
        """Return all logits of some rows, (n, vocab_size), and their log-normalizers, (n, 1).

        rows: (n,) int64. Those that can be read of ``full``.
        """
        assert self.full is not None  # the caller has asked
        return self.full.read(rows), self.log_normalizers[rows]


@dataclass(frozen=True, slots=True)
class DenseLogits(Logits):
    """All logits of each row.

    Attributes:
        values: (R, vocab_size) float32.
        logsumexp: (R,) float32. Of an engine with a gather head, where no gather was wanted: the
            same numbers that accompany a gather of these rows. None: they are added up here.
    """

    values: Float32s
    logsumexp: Float32s | None = None

    def __len__(self) -> int:
        return len(self.values)

    def part(self, rows: slice, pairs: slice) -> DenseLogits:
        """See Logits."""
        sums = None if self.logsumexp is None else self.logsumexp[rows]
        return DenseLogits(self.values[rows], sums)

    def check(self, spec: EngineSpec, num_rows: int, num_pairs: int) -> None:
        """See Logits."""
        _check_shape("logits", self.values, (num_rows, spec.vocab_size))
        if self.logsumexp is not None:
            _check_shape("logsumexp", self.logsumexp, (num_rows,))
        elif spec.head.gathers_logits:
            raise ModelError(
                "the engine gathers logits and returned whole rows without their logsumexp; a row "
                "has one sum, however it is read: return DenseLogits with it"
            )

    @property
    def whole(self) -> Float32s:
        """See Logits."""
        return self.values

    @property
    def full(self) -> FullLogits:
        """See Logits."""
        return AllLogits(self.values)

    def most_probable(self, number: int) -> tuple[Ints, Floats]:
        """See Logits."""
        return largest_logits(self.values, number or self.values.shape[1])

    def read(self, rows: Ints) -> tuple[Float32s, Floats]:
        """See Logits."""
        sums = None if self.logsumexp is None else self.logsumexp[rows]
        found = DenseLogits(self.values[rows], sums)
        return found.values, found.log_normalizers


@dataclass(frozen=True, slots=True)
class TopLogits(Logits):
    """The K largest logits of each row, by decreasing logit, ties by increasing id.

    Attributes:
        top_ids: (R, K) int64. Their tokens.
        top_logits: (R, K) float32.
        logsumexp: (R,) float32.
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

    def check(self, spec: EngineSpec, num_rows: int, num_pairs: int) -> None:
        """See Logits."""
        expected = num_rows, spec.head.num_top_logits
        shapes = self.top_ids.shape, self.top_logits.shape, self.logsumexp.shape
        if shapes != (expected, expected, (num_rows,)):
            _check_shape("top_ids", self.top_ids, expected)
            _check_shape("top_logits", self.top_logits, expected)
            _check_shape("logsumexp", self.logsumexp, (num_rows,))
        ids = self.top_ids.view(np.uint64)  # negative ids are large
        if ids.size and ids.item(ids.argmax()) >= spec.vocab_size:
            raise ModelError(
                f"the model returned top_ids from {self.top_ids.min()} to {self.top_ids.max()}, "
                f"expected 0 to {spec.vocab_size - 1}; export the engine again"
            )

    @property
    def full(self) -> FullLogits | None:
        """See Logits."""
        return self.kept

    def most_probable(self, number: int) -> tuple[Ints, Floats]:
        """See Logits; no more than K are known."""
        logits = self.top_logits
        finite(logits[:, 0])
        if len(logits.argmax(axis=1).nonzero()[0]):  # that of a row with NaN is there
            raise ModelError(
                "the model returned top_logits with NaN or a larger one behind the first; check "
                "the engine's precision and the export's parity report"
            )
        return self.top_ids[:, : number or None], logits[:, : number or None].astype(np.float64)


@dataclass(frozen=True, slots=True)
class GatheredLogits(Logits):
    """The logits of the pairs of a ``Gather``: log p of pair n is values[n] - logsumexp[rows[n]].

    Attributes:
        values: (N,) float32. In the order of the pairs.
        logsumexp: (R,) float32.
    """

    values: Float32s
    logsumexp: Float32s

    def __len__(self) -> int:
        return len(self.logsumexp)

    def part(self, rows: slice, pairs: slice) -> GatheredLogits:
        """See Logits."""
        return GatheredLogits(self.values[pairs], self.logsumexp[rows])

    def check(self, spec: EngineSpec, num_rows: int, num_pairs: int) -> None:
        """See Logits."""
        _check_shape("gathered_logits", self.values, (num_pairs,), "pair of the gather")
        _check_shape("logsumexp", self.logsumexp, (num_rows,))

    @property
    def gathered(self) -> Float32s:
        """See Logits."""
        if len(self.values) and not self.values.max() < np.inf:  # also when it is NaN
            raise ModelError(
                "the model returned gathered_logits with NaN or infinity; check the engine's "
                "precision and the export's parity report"
            )
        return self.values


class AllLogits:
    """The ``FullLogits`` of rows that were returned whole."""

    first_row = 0

    def __init__(self, values: Float32s) -> None:
        self._values = values

    def read(self, rows: Ints) -> Float32s:
        """See FullLogits."""
        return self._values[rows]


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


def _check_shape(
    name: str, found: NDArray[Any], expected: tuple[int, ...], per: str = "entry of logit_rows"
) -> None:
    if found.shape != expected:
        raise ModelError(
            f"the model returned {name} of shape {found.shape}, expected {expected}: one row per "
            f"{per}"
        )
