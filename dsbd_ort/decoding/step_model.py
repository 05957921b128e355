"""The model as the algorithm sees it: append rows to a cache, get logits, keep some rows."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ModelError


class FullLogits(Protocol):
    """All logits of the R rows of a forward, which stay with the engine until they are read."""

    @property
    def first_row(self) -> int:
        """First of the R rows that can be read, R if none can."""

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of the logits of some rows, (n, vocab_size) float32.

        rows: (n,) int64, ``first_row`` to R - 1, in any order, also repeated.

        Valid until the model's next forward or its end; raises after that.
        """


TopLogits = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], FullLogits | None]
"""What an engine with a top-k head returns of R rows: (top_ids, top_logits, logsumexp, full).

top_ids, top_logits: (R, K), the K largest logits of each row by decreasing logit, ties by
increasing id. logsumexp: (R,), the log of the sum of exp(logit) over the whole vocabulary. full:
all logits of the rows, None where the engine does not keep them.
"""

Logits = NDArray[np.float32] | TopLogits
"""The result of a forward: all logits of R rows, (R, vocab_size), or the largest of each."""

Role = Literal["target", "draft"]


class Head(Protocol):
    """What a request must know of an engine before it begins."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""


class StepModel(Head, Protocol):
    """A language model with a key/value cache of rows.

    A model whose ``forward`` returns ``TopLogits`` has a further attribute, ``num_top_logits``: K;
    and where these have ``full``, another one that is true: ``keeps_full_logits``.
    """

    @property
    def num_rows(self) -> int:
        """Rows now in the cache."""

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep these cache rows, (K,) int64 increasing, in this order; drop all others."""

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> Logits:
        """Append S rows (parents before children) and return the logits of some of them.

        Args:
            token_ids: (S,) int64.
            positions: (S,) int64. Siblings share a position.
            mask: (S, num_rows + S) bool. Row s sees cache row c; its own column is included.
            logit_rows: (R,) int64. Which of the S rows need logits; may be empty.

        Returns:
            (R, vocab_size) float32, or ``TopLogits`` of R rows.
        """


def logits_of_rows(logits: Logits, begin: int, end: int) -> Logits:
    """Return the logits of the rows ``begin`` to ``end`` - 1 of a forward's result."""
    if isinstance(logits, tuple):
        top_ids, top_logits, logsumexp, full = logits
        part = None if full is None else FullLogitsPart(full, begin, end)
        return top_ids[begin:end], top_logits[begin:end], logsumexp[begin:end], part
    return logits[begin:end]


class AllLogits:
    """The ``FullLogits`` of a forward that returns all logits."""

    first_row = 0

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See FullLogits."""
        return self._logits[rows]


class FullLogitsPart:
    """The ``FullLogits`` of one call's rows of a shared forward.

    Attributes:
        first_row: first of them that can be read.
    """

    def __init__(self, full: FullLogits, begin: int, end: int) -> None:
        """Take rows ``begin`` to ``end - 1`` of a forward, which become 0, 1, ..."""
        self._full = full
        self._begin = begin
        self._num_rows = end - begin
        self.first_row = min(max(full.first_row - begin, 0), self._num_rows)

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See FullLogits; other rows would be those of another request."""
        if ((rows < self.first_row) | (rows >= self._num_rows)).any():
            raise ModelError(
                f"full logits of rows {rows.tolist()} are read, expected rows {self.first_row} to "
                f"{self._num_rows - 1} of the call; read those of its own rows"
            )
        return self._full.read(rows + self._begin)


def num_top_logits(model: Head) -> int:
    """Return K of a model that returns the K largest logits of a row, 0 of one that returns all."""
    number: int = getattr(model, "num_top_logits", 0)
    return number


def keeps_full_logits(model: Head) -> bool:
    """Return whether all logits of a forward of a model with a top-k head can be read."""
    return bool(getattr(model, "keeps_full_logits", False))


Clock = Callable[[], float]


class Meter:
    """Counts the engine calls and rows of a request and their time, that of cache moves included.

    Attributes:
        calls: engine calls that the request took part in.
        rows: its own rows in them.
        seconds: of the calls; a call that several requests share counts whole for each.
        waited: seconds in which the request waited for logits behind its prompt, calls of others
            included.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.rows = 0
        self.seconds = 0.0
        self.waited = 0.0

    def count(self, num_rows: int, seconds: float) -> None:
        """Count a call with ``num_rows`` rows of this request."""
        self.calls += 1
        self.rows += num_rows
        self.seconds += seconds


@dataclass(eq=False, slots=True)
class EngineCall:
    """One forward that a request needs before it can go on.

    The loop yields it and never makes it: a request alone has its calls made at once, several
    requests share theirs.

    Attributes:
        role: the engine.
        meter: of the request, for this engine.
        token_ids, positions, logit_rows: the arguments of ``StepModel.forward``.
        mask: returns the fourth, (S, first_row + S) bool, once it is known in which row of the
            cache the first of the S new ones will be; called once, just before the forward.
        is_prefill: whether it computes a part of the prompt.
        reads_full_logits: whether all logits of its rows are read where the engine has a top-k
            head: the engine keeps those of its own forward, not of all calls that share one.
    """

    role: Role
    meter: Meter
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    mask: Callable[[int], NDArray[np.bool_]]
    is_prefill: bool = False
    reads_full_logits: bool = False


Result = TypeVar("Result")
EngineCalls = Generator[EngineCall, Logits, Result]
"""A computation that needs engine calls on its way to a result: each is answered by its logits."""
