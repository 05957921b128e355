"""The model as the algorithm sees it: append rows to a cache, get logits, keep some rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ModelError

if TYPE_CHECKING:
    from dsbd_ort.decoding.feature_models import FeatureCall


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

Gather = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Logits that are wanted of R rows, as pairs: (rows, token_ids), (N,) each, in any order.

rows: the index of each pair's row among the R.
"""


class GatheredLogits(Protocol):
    """What an engine with a gather head returns for the N pairs of a ``Gather``.

    Attributes:
        logits: (N,) float32. In the order of the pairs.
        logsumexp: (R,) float32. Log of the sum of exp(logit) of a row over the whole vocabulary.
    """

    @property
    def logits(self) -> NDArray[np.float32]:
        """See above."""

    @property
    def logsumexp(self) -> NDArray[np.float32]:
        """See above."""


class SummedLogits(Protocol):
    """What an engine with a gather head returns without a gather: R whole rows, and their sums.

    Attributes:
        logits: (R, vocab_size) float32.
        logsumexp: (R,) float32. As in ``GatheredLogits``: a row has one, however it is read.
    """

    @property
    def logits(self) -> NDArray[np.float32]:
        """See above."""

    @property
    def logsumexp(self) -> NDArray[np.float32]:
        """See above."""


@dataclass(frozen=True, slots=True)
class SummedRows:
    """The ``SummedLogits`` of the rows of one call."""

    logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]


WholeLogits = NDArray[np.float32] | TopLogits | SummedRows
"""The result of a forward without a gather: all logits of R rows, (R, vocab_size), with their sums
where the engine returns them, or the largest of each."""

Logits = WholeLogits | GatheredLogits
"""The result of any forward."""

Role = Literal["target", "draft"]


class Head(Protocol):
    """What a request must know of an engine before it begins."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""


class StepModel(Head, Protocol):
    """A language model with a key/value cache of rows.

    A model whose ``forward`` returns ``TopLogits`` has a further attribute, ``num_top_logits``: K;
    and where these have ``full``, another one that is true: ``keeps_full_logits``. One that takes a
    ``Gather`` as fifth argument, and then returns ``GatheredLogits``, but ``SummedLogits`` without,
    has one that is true as well: ``gathers_logits``. Models with features have methods of their
    own, see ``feature_models``.
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
    ) -> NDArray[np.float32] | TopLogits | SummedLogits:
        """Append S rows (parents before children) and return the logits of some of them.

        Args:
            token_ids: (S,) int64.
            positions: (S,) int64. Siblings share a position.
            mask: (S, num_rows + S) bool. Row s sees cache row c; its own column is included.
            logit_rows: (R,) int64. Which of the S rows need logits; may be empty.

        Returns:
            (R, vocab_size) float32, or ``TopLogits`` or ``SummedLogits`` of R rows.
        """


class GatheringModel(Protocol):
    """A StepModel that ``gathers_logits``, as a forward with a gather sees it."""

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        gather: Gather,
    ) -> GatheredLogits:
        """Append rows as ``StepModel.forward`` does, and return these of their logits."""


@dataclass(frozen=True, slots=True)
class GatheredPart:
    """The ``GatheredLogits`` of one call's rows and pairs of a shared forward."""

    logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]


def gathered_parts(gathered: GatheredLogits, calls: Sequence[EngineCall]) -> list[Logits]:
    """Return for each of the calls of a shared forward its own rows and pairs."""
    parts: list[Logits] = []
    row = pair = 0
    for call in calls:
        last_row = row + len(call.logit_rows)
        last_pair = pair + (0 if call.gather is None else len(call.gather[0]))
        parts.append(
            GatheredPart(gathered.logits[pair:last_pair], gathered.logsumexp[row:last_row])
        )
        row, pair = last_row, last_pair
    return parts


def joined_gather(calls: Sequence[EngineCall]) -> Gather:
    """Return the pairs of several calls, whose logit rows lie one behind the other."""
    rows, token_ids, first = [_NONE], [_NONE], 0
    for call in calls:
        if call.gather is not None:
            rows.append(call.gather[0] + first)
            token_ids.append(call.gather[1])
        first += len(call.logit_rows)
    return np.concatenate(rows), np.concatenate(token_ids)


_NONE = np.arange(0)


def num_rows_of(logits: WholeLogits) -> int:
    """Return R of a forward's result."""
    if isinstance(logits, tuple):
        return len(logits[0])
    return len(logits.logits if isinstance(logits, SummedRows) else logits)


def summed_rows(logits: SummedLogits | object) -> SummedRows:
    """Return what a model that ``gathers_logits`` has returned without a gather.

    Raises:
        ModelError: it is something else.
    """
    try:
        return SummedRows(logits.logits, logits.logsumexp)  # type: ignore[union-attr]
    except AttributeError:
        raise ModelError(
            f"the model gathers logits and returned {type(logits).__name__} for whole rows, "
            "expected their logits and logsumexp: a row has one sum, however it is read"
        ) from None


def logits_of_rows(logits: WholeLogits, begin: int, end: int) -> Logits:
    """Return the logits of the rows ``begin`` to ``end`` - 1 of a forward's result."""
    if isinstance(logits, tuple):
        top_ids, top_logits, logsumexp, full = logits
        part = None if full is None else FullLogitsPart(full, begin, end)
        return top_ids[begin:end], top_logits[begin:end], logsumexp[begin:end], part
    if isinstance(logits, SummedRows):
        return SummedRows(logits.logits[begin:end], logits.logsumexp[begin:end])
    return logits[begin:end]


class AllLogits:
    """The ``FullLogits`` of a forward that returns all logits."""

    first_row = 0

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See FullLogits."""
        return self._logits[rows]


def full_of(logits: Logits) -> FullLogits | None:
    """Return all logits of the rows of a forward's result, None where they cannot be read."""
    if isinstance(logits, tuple):
        return logits[3]
    if isinstance(logits, SummedRows):
        return AllLogits(logits.logits)
    return AllLogits(logits) if isinstance(logits, np.ndarray) else None


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


def gathers_logits(model: Head) -> bool:
    """Return whether a model takes a ``Gather``."""
    return bool(getattr(model, "gathers_logits", False))


Clock = Callable[[], float]


class Meter:
    """Counts the engine calls and rows of a request and their time, that of cache moves included.

    Attributes:
        calls: engine calls that the request took part in.
        rows: its own rows in them.
        seconds: of the calls; a call that several requests share counts whole for each.
        waited: seconds in which the request waited for its calls, those of others included.
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
        gather: the logits of its rows that are wanted, of an engine that ``gathers_logits``; None:
            all. Calls that want all and calls that do not share no forward.
        features: those that its rows need or bring, see ``feature_models``; None: none.
    """

    role: Role
    meter: Meter
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    mask: Callable[[int], NDArray[np.bool_]]
    is_prefill: bool = False
    reads_full_logits: bool = False
    gather: Gather | None = None
    features: FeatureCall | None = None

    @property
    def wants_all_logits(self) -> bool:
        """Whether it needs rows of the vocabulary's size where the engine has them."""
        return self.gather is None and len(self.logit_rows) > 0


Result = TypeVar("Result")
EngineCalls = Generator[EngineCall, Logits, Result]
"""A computation that needs engine calls on its way to a result: each is answered by its logits."""
