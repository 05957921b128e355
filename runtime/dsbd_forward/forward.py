"""One forward of an engine over nodes of a forest, and its result; joining of several forwards.

S: new rows, parents before children. N: rows of the cache, including the S new rows. R: rows whose
logits are returned. F: rows whose features are returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import Features, ParentFeatures, joined_parents
from dsbd_forward.logits import Logits
from dsbd_forward.rows import NO_INTS, Ints

Source = Hashable | None
"""Input that a request's rows depend on in addition to tokens, such as the input of an encoder.

None: no such input. Rows of equal tokens but different sources are never shared, except rows before
the beginning of a ``LateSource``."""


class LateSource(ABC):
    """A source, such as sound within a prompt, on which the first rows of a path do not depend."""

    @abstractmethod
    def num_alike(self, other: Source) -> int:
        """Return how many first rows of a path are the same with a different source ``other``."""


def num_alike(source: Source, other: Source) -> int | None:
    """Return how many first rows of equal tokens two sources share; None: all rows."""
    if source == other:
        return None
    for one, two in ((source, other), (other, source)):
        if isinstance(one, LateSource):
            return one.num_alike(two)
    return 0


NO_ROW = -1


@dataclass(frozen=True, slots=True)
class RowSources:
    """The sources of S rows."""

    distinct: tuple[Source, ...]  # in the order of their first rows
    index: Ints  # (S,). Index in ``distinct`` of each row's source

    @classmethod
    def joined(cls, sources: Sequence[RowSources]) -> RowSources:
        number_by_source: dict[Source, int] = {}
        index = []
        for each in sources:
            numbers = [
                number_by_source.setdefault(source, len(number_by_source))
                for source in each.distinct
            ]
            index.append(np.array(numbers)[each.index])
        return cls(tuple(number_by_source), np.concatenate(index))

    def part(self, start: int, stop: int) -> RowSources:
        used, first, index = np.unique(
            self.index[start:stop], return_index=True, return_inverse=True
        )
        order = first.argsort()
        distinct = tuple(self.distinct[number] for number in used[order].tolist())
        return RowSources(distinct, order.argsort()[index])


@dataclass(slots=True)
class Forward:
    """The rows that a forward appends to an engine's cache, and the results that it returns.

    Treat as immutable. Not frozen: constructing a frozen dataclass takes four times as long.

    Attributes:
        token_ids: (S,) int64.
        positions: (S,) int64. Siblings share a position.
        mask: (S, N) bool. Row s sees cache row c; the last S columns are the new rows, each of
            which sees itself.
        logit_rows: (R,) int64. The rows among the S new ones whose logits are needed, in any order;
            may be empty.
        feature_rows: (F,) int64 increasing. The rows among the S new ones whose features are
            returned, for an engine that returns features; None: no rows.
        parent_features: for a feature draft, the place of the feature of each row's parent. It
            returns its own features of all rows.
        source: the source of all rows; None also if the rows have several sources.
        sources: the sources of the rows if they have several (engine with ``joins_sources``); None:
            all rows have ``source``.
        is_ordered: whether the caller guarantees that no row sees a later row, so that the engine
            need not check the mask.
    """

    token_ids: Ints
    positions: Ints
    mask: NDArray[np.bool_]
    logit_rows: Ints
    feature_rows: Ints | None = None
    parent_features: ParentFeatures | None = None
    source: Source = None
    sources: RowSources | None = None
    is_ordered: bool = False

    @property
    def row_sources(self) -> RowSources:
        return self.sources or RowSources((self.source,), np.zeros(self.num_new, np.int64))

    @property
    def num_new(self) -> int:
        """S, the rows that the forward appends."""
        return len(self.token_ids)

    @property
    def num_features(self) -> int:
        """F, the rows whose features are returned."""
        if self.parent_features is not None:
            return self.num_new
        return 0 if self.feature_rows is None else len(self.feature_rows)

    @property
    def parents(self) -> Ints:
        """The cache row of each new node's parent, (S,) int64; ``NO_ROW`` without a parent."""
        return self.ancestors(1)[:, 0]

    def ancestors(self, number: int) -> Ints:
        """Return the cache rows of each new node's last ``number`` ancestors, (S, number) int64.

        The oldest is first, the parent last; ``NO_ROW`` before the path begins. The rows of a path
        are in the cache in the order of the path. With two rows in the cache and number 2, the mask

            [[1, 1, 1, 0],
             [1, 0, 0, 1]]

        gives [[0, 1], [-1, 0]].
        """
        num_new, num_rows = self.mask.shape
        above = self.mask.copy()
        nodes = np.arange(num_new)
        above[nodes, num_rows - num_new + nodes] = False
        from_last = above[:, ::-1]
        rows = np.empty((num_new, number), np.int64)
        for place in reversed(range(number)):
            last = num_rows - 1 - from_last.argmax(axis=1)
            rows[:, place] = np.where(above[nodes, last], last, NO_ROW)
            above[nodes, last] = False
        return rows

    def part(self, start: int, stop: int) -> Forward:
        """Return the rows ``start`` to ``stop - 1`` as a separate forward."""
        num_before = self.mask.shape[1] - self.num_new
        is_in_part = self.logit_rows_in(start, stop)
        feature_rows = self.feature_rows
        if feature_rows is not None:
            begin, end = np.searchsorted(feature_rows, (start, stop)).tolist()
            feature_rows = feature_rows[begin:end] - start
        sources = self.sources and self.sources.part(start, stop)
        return Forward(
            self.token_ids[start:stop],
            self.positions[start:stop],
            self.mask[start:stop, : num_before + stop],
            self.logit_rows[is_in_part] - start,
            feature_rows,
            self.parent_features and self.parent_features.part(start, stop),
            *(_one_or_several(sources) if sources else (self.source, None)),
            self.is_ordered,
        )

    def logit_rows_in(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the logit rows, (R,) bool, are among ``start`` to ``stop - 1``."""
        return (start <= self.logit_rows) & (self.logit_rows < stop)


@dataclass(frozen=True, slots=True)
class SourceReading:
    """The reading of a source for a forward, before its rows were computed.

    num_tokens: tokens of the source.
    seconds: time of the reading, which is part of the time of the call.
    own_seconds: part of ``seconds`` in this engine. It is less if a draft that shares the target's
        encoder needs the source first, and makes the target read it.
    """

    num_tokens: int
    seconds: float
    own_seconds: float


@dataclass(eq=False, slots=True)
class ForwardResult:
    """The result of a forward.

    Attributes:
        logits: logits of the R rows.
        features: features of the F rows, or of the joined forward that computed them; None if the
            engine returns no features.
        first_feature: index in ``features`` of the first of the F rows.
        reading: reading of the source; None if it was read before, or there is no source.
        run_s: seconds in the engine's runtime, without the host's work before and after; None if
            not measured.
        failed: for a forward with several sources, errors by source; the results of these sources'
            rows are invalid. None: all sources were read.
        sets_up: whether the engine did work that later calls of this size do not need, such as
            binding or recording the call. Its time says nothing about theirs.
    """

    logits: Logits
    features: Features | None = None
    first_feature: int = 0
    reading: SourceReading | None = None
    run_s: float | None = None
    failed: Mapping[Source, Exception] | None = None
    sets_up: bool = False

    def engine_s(self, call_s: float) -> float:
        """Return the seconds in the engine, including encoders, of a call that took ``call_s``."""
        if self.run_s is None:
            return call_s
        return self.run_s + (self.reading.seconds if self.reading else 0.0)

    def parts(self, forwards: Sequence[Forward]) -> list[ForwardResult]:
        """Return the result of each forward that was joined into this one."""
        if len(forwards) == 1:
            return [self]
        parts: list[ForwardResult] = []
        row = feature = 0
        for forward in forwards:
            rows = slice(row, row := row + len(forward.logit_rows))
            logits = self.logits.part(rows)
            of_all = self.reading, self.run_s, self.failed, self.sets_up
            parts.append(ForwardResult(logits, self.features, feature, *of_all))
            feature += forward.num_features
        return parts


def joined_forward(forwards: Sequence[Forward]) -> Forward:
    """Return one forward that appends the rows of several forwards, one after the other.

    The mask of each forward was made for its place among them. Example: two requests with the cache
    rows [0, 1] and [2] append two rows and one row. The mask over the six rows is then

        [[1, 1, 0, 1, 0, 0],
         [1, 1, 0, 1, 1, 0],
         [0, 0, 1, 0, 0, 1]]
    """
    if len(forwards) == 1:
        return forwards[0]
    sizes = np.array([forward.num_new for forward in forwards])
    ends = sizes.cumsum()
    num_rows = max(forward.mask.shape[1] for forward in forwards)  # the last forward's
    mask = np.zeros((int(ends[-1]), num_rows), dtype=np.bool_)
    for forward, end, size in zip(forwards, ends.tolist(), sizes.tolist(), strict=True):
        mask[end - size : end, : forward.mask.shape[1]] = forward.mask
    parents = [f.parent_features for f in forwards if f.parent_features is not None]
    begins = ends - sizes
    feature_rows = None
    if any(forward.feature_rows is not None for forward in forwards):
        given = [NO_INTS if f.feature_rows is None else f.feature_rows for f in forwards]
        feature_rows = _joined_rows(given, begins)
    return Forward(
        np.concatenate([forward.token_ids for forward in forwards]),
        np.concatenate([forward.positions for forward in forwards]),
        mask,
        _joined_rows([forward.logit_rows for forward in forwards], begins),
        feature_rows,
        joined_parents(parents) if parents else None,
        *_one_or_several(RowSources.joined([forward.row_sources for forward in forwards])),
        all(forward.is_ordered for forward in forwards),
    )


def _one_or_several(sources: RowSources) -> tuple[Source, RowSources | None]:
    """Return the fields ``source`` and ``sources`` of a forward."""
    return (sources.distinct[0], None) if len(sources.distinct) == 1 else (None, sources)


def _joined_rows(rows: Sequence[Ints], begins: Ints) -> Ints:
    return np.concatenate([part + begin for part, begin in zip(rows, begins, strict=True)])
