"""Rows of one engine's key/value cache, of one request or of several: append, keep, trim.

A request sees its rows through a ``CacheView``; the engine sees one cache and one mask, in which no
row of a view sees a row of another. Views whose tokens begin alike share the rows of their common
prefix. A view gives rows up at no cost; the engine drops them together, before a call, when they
are many or there is too little room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import Engine, GrowingEngine, SourceReader, SteppedEngine
from dsbd_forward.features import Features
from dsbd_forward.forward import ForwardResult, Source, joined_forward, num_alike
from dsbd_ort.decoding.distribution import larger
from dsbd_ort.decoding.engine_call import EngineCall

Rows = NDArray[np.int64]

PREFILL_CHUNK = 256
"""Prompt rows per call: bounds the mask at PREFILL_CHUNK x capacity."""

MOST_UNUSED_ROWS = 64
"""So many rows that no view sees, and a quarter of the others, may lie between these: an unused row
costs a masked column, dropping it moves those after it in every transformer layer. No quarter if
rows are folded, which waits for unused ones to be dropped."""

_WORTH_DROPPING = 32
"""More unused rows than these are dropped before the cache grows, which copies it whole."""

_MOST_CLOSED = 256
"""Closed views whose rows may serve a request that begins alike."""


@dataclass(frozen=True)
class RowIdentity:
    """Everything that the rows of a path depend on, from position 0 on; equal ones share rows."""

    tokens: list[int]
    source: Source = None

    def num_common(self, other: RowIdentity) -> int:
        num_alike_places = num_alike(self.source, other.source)
        num_common = 0
        for ours, theirs in islice(zip(self.tokens, other.tokens, strict=False), num_alike_places):
            if ours != theirs:
                break
            num_common += 1
        return num_common


@dataclass(frozen=True)
class PromptFeature:
    """The target's feature of the last of so many first tokens, for the draft's row of the next."""

    num_tokens: int
    feature: Features


@dataclass
class PrefixCache:
    """The tokens whose rows begin a path in an engine's cache, for a request that begins alike.

    Valid between two requests, also after one that was given up half-way. rows: (>= num_tokens,)
    int64 increasing, of each token. feature: the target's after the last prompt, for a draft.
    start: the first token of the path after ``num_begin`` begin tokens, see ``DraftContext``.
    """

    tokens: list[int] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: np.arange(0))
    feature: PromptFeature | None = None
    source: Source = None
    start: int = 0
    num_begin: int = 0

    @property
    def identity(self) -> RowIdentity:
        return RowIdentity(self.tokens, self.source)

    def identity_of(self, path: RowIdentity) -> RowIdentity:
        """Return what rows that begin at ``start`` would be of a path."""
        tokens = [*self.tokens[: self.num_begin], *path.tokens[self.start :]]
        return RowIdentity(tokens, path.source)

    def begin(self, identity: RowIdentity) -> None:
        """Keep what a path has in common with these rows; be a prefix of that path from now on."""
        self.shorten(self.identity.num_common(identity))
        self.source = identity.source

    def shorten(self, num_tokens: int) -> None:
        self.tokens, self.rows = self.tokens[:num_tokens], self.rows[:num_tokens]
        if self.feature is not None and self.feature.num_tokens > num_tokens:
            self.feature = None

    def copy_of(self, num_tokens: int) -> PrefixCache:
        copy = PrefixCache(self.tokens, self.rows, self.feature, self.source)
        copy.shorten(num_tokens)
        return copy


class UsedRows(Protocol):
    """Rows that a request uses now, ``prefix`` for its prompt: the seam of cache and requests."""

    prefix: PrefixCache

    def used(self) -> NDArray[np.bool_]:
        """Return which rows of the cache they are, (num_rows of the engine,) bool."""

    def renumber(self, kept: Rows, new_rows: Rows) -> None:
        """Follow the engine, which has kept the rows ``kept``; ``new_rows`` is new row by old."""


class SharedKVCache:
    """The key/value cache of one engine; ``max_rows``: most rows that it may hold, or None."""

    def __init__(
        self, model: Engine, max_rows: int | None = None, *, shares_prefixes: bool = True
    ) -> None:
        """Take an engine; without ``shares_prefixes`` no view begins with rows of another."""
        self.model = model
        is_stepped = model.spec.memory.grows_in_steps
        self._stepped = cast(SteppedEngine, model) if is_stepped else None
        self.max_rows = max_rows
        self._shares_prefixes = shares_prefixes
        self._views: list[UsedRows] = []
        self._source_by_reader: dict[UsedRows, Source] = {}  # preempted ones included
        self._closed: list[PrefixCache] = []  # oldest first
        self._next_check = 0  # so many rows may be there before the unused are counted
        # See ``recorded``.
        self._recorded = np.zeros((2, max(model.num_rows, 256)), dtype=np.int64)

    @property
    def num_views(self) -> int:
        """Views whose rows are there, the closed ones included."""
        return len(self._views) + len(self._closed)

    @property
    def num_used(self) -> int:
        """Rows that an open view sees."""
        return int(self._used().sum())

    def open_view(self, view: UsedRows) -> None:
        """Keep the rows of a new view: those of its prefix, usually of an earlier cache."""
        prefix, num_tokens = view.prefix, len(view.prefix.tokens)
        rows = prefix.rows[:num_tokens]
        self._recorded[0, rows], self._recorded[1, rows] = prefix.tokens, np.arange(num_tokens)
        self.add(view)
        if self.model.spec.joins_sources:
            self._source_by_reader[view] = prefix.source

    def add(self, rows: UsedRows) -> None:
        """Keep these rows until they are closed or removed."""
        self._views.append(rows)
        self._next_check = 0

    def remove(self, rows: UsedRows) -> None:
        self._views.remove(rows)
        self._next_check = 0

    def longest_prefix(self, identity: RowIdentity) -> PrefixCache:
        """Return a copy of the longest prefix of a path of any view, with the path's source."""
        longest, num_common = PrefixCache(), 0
        others = (*(view.prefix for view in self._views), *self._closed)
        for other in others if self._shares_prefixes else ():
            if (num_alike_tokens := other.identity.num_common(identity)) > num_common:
                longest, num_common = other, num_alike_tokens
        copy = longest.copy_of(num_common)
        copy.source = identity.source
        return copy

    def close_view(self, view: UsedRows) -> None:
        """Give up a view's rows; until dropped its prefix may serve a request that begins alike."""
        if view not in self._views:
            return
        self.remove(view)
        if view.prefix.tokens:
            self._closed.append(view.prefix)
            del self._closed[:-_MOST_CLOSED]

    def read_source(self, source: Source) -> None:
        """Let an engine that joins sources read one before a forward has it among others."""
        cast(SourceReader, self.model).read_source(source)

    def release_source(self, view: UsedRows) -> None:
        """Tell the engine that a request is over, if it was the last one of its source."""
        if view in self._source_by_reader:
            source = self._source_by_reader.pop(view)
            if source not in self._source_by_reader.values():
                cast(SourceReader, self.model).release_source(source)

    def recorded(self, rows: Rows) -> NDArray[np.int64]:
        """Return tokens and positions of these rows, (2, n) int64."""
        return self._recorded[:, rows]

    def has_room(self, num_new: int) -> bool:
        """Return whether this many rows fit in addition to those in use."""
        if self.max_rows is None or self.model.num_rows + num_new <= self.max_rows:
            return True
        return self.num_used + num_new <= self.max_rows

    def expect(self, num_new: int) -> None:
        """Let the engine make room for so many more rows than are in use, within its limit."""
        if not self.model.spec.memory.grows_at_a_cost:
            return
        num_rows = self.num_used + num_new
        num_rows += MOST_UNUSED_ROWS + num_rows // 4  # see ``_make_room``
        expected = num_rows if self.max_rows is None else min(num_rows, self.max_rows)
        cast(GrowingEngine, self.model).expect(expected)

    def forward(self, calls: Sequence[EngineCall]) -> list[ForwardResult]:
        """Make calls that share a group in one forward of the engine; return the result of each."""
        num_new = 0
        for call in calls:
            num_new += call.num_rows
        self._make_room(num_new)
        forwards, first_row = [], self.model.num_rows
        for call in calls:
            forward, end = call.forward_at(first_row), first_row + call.num_rows
            if end > self._recorded.shape[1]:
                self._recorded = larger(self._recorded.T, 2 * end).T
            self._recorded[0, first_row:end] = forward.token_ids
            self._recorded[1, first_row:end] = forward.positions
            forwards.append(forward)
            first_row = end
        if len(forwards) == 1:  # usually
            return [self.model.forward(forwards[0])]
        return self.model.forward(joined_forward(forwards)).parts(forwards)

    def forget(self) -> None:
        """Let no view begin with rows of closed ones."""
        self._closed.clear()

    def keep_for(self, identity: RowIdentity) -> None:
        """Drop all rows except the longest prefix of a path that is here. No view may be open."""
        paths = [(each, each.identity_of(identity)) for each in self._closed]
        if not self._shares_prefixes:
            paths = []
        num_common = [each.identity.num_common(path) for each, path in paths]
        longest = max(num_common, default=0)
        kept = PrefixCache()
        if longest:
            kept = paths[num_common.index(longest)][0]
            kept.shorten(longest)
        self._keep_rows(kept.rows)
        kept.rows = np.arange(len(kept.rows))
        self._closed = [kept] if longest else []

    def _make_room(self, num_new: int) -> None:
        """Drop the unused rows if they are many, or if they leave no room for ``num_new`` rows."""
        num_rows = self.model.num_rows
        is_full = self.max_rows is not None and num_rows + num_new > self.max_rows
        grows = self._stepped is not None and num_new > self._stepped.num_free_rows
        if num_rows <= self._next_check and not (is_full or grows):
            return
        is_used = self._used()
        num_used = int(np.count_nonzero(is_used))
        most_unused = MOST_UNUSED_ROWS
        if not self.model.spec.memory.folds_rows:
            most_unused += num_used // 4
        self._next_check = num_used + most_unused
        if grows:
            most_unused = min(most_unused, _WORTH_DROPPING)
        if num_rows - num_used > (0 if is_full else most_unused):
            self._keep(is_used)

    def _used(self) -> NDArray[np.bool_]:
        """Return which rows an open view sees, (num_rows,) bool."""
        is_used = np.zeros(self.model.num_rows, dtype=np.bool_)
        for view in self._views:
            is_used |= view.used()
        return is_used

    def _keep(self, is_used: NDArray[np.bool_]) -> None:
        """Drop all other rows, those of closed views among them."""
        self._closed.clear()
        if is_used.all():
            return
        kept = is_used.nonzero()[0]
        self._keep_rows(kept)
        new_rows = is_used.cumsum() - 1
        for view in self._views:
            view.renumber(kept, new_rows)

    def _keep_rows(self, rows: Rows) -> None:
        if len(rows) == self.model.num_rows:
            return
        self.model.keep(rows)
        self._recorded[:, : len(rows)] = self._recorded.take(rows, axis=1)
        self._next_check = 0
