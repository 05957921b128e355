"""Logits of the R rows of a forward: all logits of each row, or the largest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.errors import ModelError
from dsbd_forward.rows import Floats, Ints, added_up, finite, largest_logits
from dsbd_forward.spec import EngineSpec

Float32s = NDArray[np.float32]


class FullLogits(Protocol):
    """All logits of the R rows of a forward; reading them after the next forward is an error."""

    def read(self, rows: Ints) -> Float32s:
        """Return a copy of some rows' logits, (n, vocab_size); rows: (n,) int64, may repeat."""

    def read_tokens(self, rows: Ints, token_ids: Ints) -> Float32s:
        """Return the logit of a token in each of some rows; all arrays are (n,)."""


class Logits(ABC):
    """The logits of the R rows of a forward; a subclass for each kind of head.

    The raw log-probability of a token is its logit minus the row's log-normalizer, in float64. A
    top-k head returns the normalizer with the row; otherwise it is computed here. So a
    log-probability depends only on the engine and the path, never on the call.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return R."""

    @abstractmethod
    def part(self, rows: slice) -> Logits:
        """Return the logits of some neighbouring rows."""

    @abstractmethod
    def check(self, spec: EngineSpec, num_rows: int) -> None:
        """Raise ModelError unless these can be logits of ``num_rows`` rows of an engine."""

    @property
    def whole(self) -> Float32s | None:
        """All logits of every row, (R, vocab_size); None if they were not returned."""
        return None

    @property
    @abstractmethod
    def full(self) -> FullLogits | None:
        """All logits of the rows; None if they cannot be read."""

    @property
    @abstractmethod
    def log_normalizers(self) -> Floats:
        """Log of each row's sum of exp(logit), (R, 1) float64; ModelError: not finite."""

    @abstractmethod
    def most_probable(self, number: int) -> tuple[Ints, Floats]:
        """Return the most probable tokens of every row, at most ``number``; 0: all available.

        Tokens (R, n) int64 by decreasing logit, ties by increasing id, and their logits, (R, n)
        float64. ModelError: a row has NaN, an infinite first logit, or a larger logit after it.
        """

    def read(self, rows: Ints) -> tuple[Float32s, Floats]:
        """Return all logits of some rows, (n, vocab_size), and log-normalizers, (n, 1)."""
        assert self.full is not None  # the caller has checked it
        return self.full.read(rows), self.log_normalizers[rows]


@dataclass(eq=False, slots=True)
class DenseLogits(Logits):
    """All logits of each row, (R, vocab_size) float32."""

    values: Float32s

    def __len__(self) -> int:
        return len(self.values)

    def part(self, rows: slice) -> DenseLogits:
        return DenseLogits(self.values[rows])

    def check(self, spec: EngineSpec, num_rows: int) -> None:
        _check_shape("logits", self.values, (num_rows, spec.vocab_size))

    @property
    def whole(self) -> Float32s:
        return self.values

    @property
    def full(self) -> FullLogits:
        return AllLogits(self.values)

    @property
    def log_normalizers(self) -> Floats:
        return added_up(self.values)

    def most_probable(self, number: int) -> tuple[Ints, Floats]:
        finite(np.maximum.reduce(self.values, axis=1))
        return largest_logits(self.values, number or self.values.shape[1])

    def read(self, rows: Ints) -> tuple[Float32s, Floats]:
        logits = self.values[rows]
        return logits, added_up(logits)


@dataclass(eq=False, slots=True)
class TopLogits(Logits):
    """The K largest logits of each row, by decreasing logit, ties by increasing id."""

    top_ids: Ints  # (R, K)
    top_logits: Float32s  # (R, K)
    logsumexp: Float32s  # (R,)
    kept: FullLogits | None = None  # all logits of the rows, if the engine keeps them

    def __len__(self) -> int:
        return len(self.top_ids)

    def part(self, rows: slice) -> TopLogits:
        kept = None if self.kept is None else FullLogitsPart(self.kept, rows.start, rows.stop)
        return TopLogits(self.top_ids[rows], self.top_logits[rows], self.logsumexp[rows], kept)

    def check(self, spec: EngineSpec, num_rows: int) -> None:
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
        return self.kept

    @property
    def log_normalizers(self) -> Floats:
        column: Floats = finite(self.logsumexp).astype(np.float64)[:, None]
        return column

    def most_probable(self, number: int) -> tuple[Ints, Floats]:
        """See Logits; at most K tokens are available."""
        logits = self.top_logits
        finite(logits[:, 0])
        if len(logits.argmax(axis=1).nonzero()[0]):  # argmax returns the place of a NaN
            raise ModelError(
                "the model returned top_logits with NaN or a larger one after the first; check "
                "the engine's precision and the export's parity report"
            )
        return self.top_ids[:, : number or None], logits[:, : number or None].astype(np.float64)


class AllLogits:
    """``FullLogits`` of rows whose logits were all returned."""

    def __init__(self, values: Float32s) -> None:
        self._values = values

    def read(self, rows: Ints) -> Float32s:
        return self._values[rows]

    def read_tokens(self, rows: Ints, token_ids: Ints) -> Float32s:
        return self._values[rows, token_ids]


class FullLogitsPart:
    """``FullLogits`` of one request's rows in a shared forward."""

    def __init__(self, full: FullLogits, begin: int, end: int) -> None:
        """Take rows ``begin`` to ``end - 1`` of a forward; here they are rows 0, 1, ..."""
        self._full = full
        self._begin = begin
        self._num_rows = end - begin

    def read(self, rows: Ints) -> Float32s:
        return self._full.read(self._rows_of_all(rows))

    def read_tokens(self, rows: Ints, token_ids: Ints) -> Float32s:
        return self._full.read_tokens(self._rows_of_all(rows), token_ids)

    def _rows_of_all(self, rows: Ints) -> Ints:
        """Return rows of the forward; raise ModelError for rows of another request."""
        if ((rows < 0) | (rows >= self._num_rows)).any():
            raise ModelError(
                f"full logits of rows {rows.tolist()} are read, expected rows 0 to "
                f"{self._num_rows - 1}, those of the call itself"
            )
        return rows + self._begin


def _check_shape(name: str, array: NDArray[Any], expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ModelError(
            f"the model returned {name} of shape {array.shape}, expected {expected}: one row per "
            "entry of logit_rows"
        )
