"""One engine's key/value cache shared by several requests: one forward computes rows of all.

A request sees its own rows alone, through a ``CacheView``; the engine sees one cache and one mask,
in which no row of a view sees one of another. Views whose tokens begin alike share the rows of
their common prefix. A view drops rows at once, which costs nothing; the engine drops them together,
when ``_make_room`` finds many of them or too little room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.forest_cache import PrefixCache
from dsbd_ort.decoding.step_model import EngineCall, FullLogits, Logits, StepModel, num_top_logits

MOST_UNUSED_ROWS = 64
"""Rows of no view that may lie between the others, and besides them a quarter of the others: an
unused row costs a masked column, dropping it moves those behind it in every transformer layer."""

_MOST_CLOSED = 256
"""Closed views whose rows may serve a request that begins alike."""


class CacheView:
    """One request's share of an engine's cache: a RowCache with rows of its own.

    Attributes:
        model: the engine.
        rows: (num_rows,) int64 increasing. Its rows of the engine's cache.
        prefix: the tokens of the first of them.
    """

    def __init__(self, model: StepModel, rows: NDArray[np.int64], prefix: PrefixCache) -> None:
        self.model = model
        self.rows = rows
        self.prefix = prefix

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.model.vocab_size

    @property
    def num_rows(self) -> int:
        """Rows of this view."""
        return len(self.rows)

    @property
    def num_top_logits(self) -> int:
        """See StepModel."""
        return num_top_logits(self.model)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """See RowCache.keep; dropped rows stay in the engine's cache until it needs the room."""
        self.rows = self.rows[rows]


class SharedKVCache:
    """An engine whose cache holds the rows of several views.

    Attributes:
        model: the engine.
        max_rows: most rows that its cache may hold, None for no limit.
    """

    def __init__(
        self, model: StepModel, max_rows: int | None = None, *, shares_prefixes: bool = True
    ) -> None:
        """Take an engine; the rows in its cache are unused.

        Without ``shares_prefixes`` no view begins with rows of another.
        """
        self.model = model
        self.max_rows = max_rows
        self._shares_prefixes = shares_prefixes
        self._views: list[CacheView] = []
        self._closed: list[
            CacheView
        ] = []  # oldest first; their rows are there until they are dropped

    @property
    def num_views(self) -> int:
        """Views whose rows are there, the closed ones included."""
        return len(self._views) + len(self._closed)

    def open_view(self, token_ids: Sequence[int]) -> CacheView:
        """Return a view that begins with the longest prefix of ``token_ids`` in any other."""
        rows, tokens = np.arange(0), list(token_ids)
        num_common = 0
        others = (*self._views, *self._closed) if self._shares_prefixes else ()
        for other in others:
            if (found := other.prefix.num_common(tokens)) > num_common:
                rows, num_common = other.rows[:found], found
        view = CacheView(self.model, rows, PrefixCache(tokens[:num_common]))
        self._views.append(view)
        return view

    def close_view(self, view: CacheView) -> None:
        """Give up a view's rows; until dropped they may serve a request that begins alike."""
        self._views.remove(view)
        if view.prefix.tokens:
            self._closed.append(view)
            del self._closed[:-_MOST_CLOSED]

    def run(self, calls: Sequence[tuple[CacheView, EngineCall]]) -> list[Logits]:
        """Make the calls of several views in one forward of the engine; return the logits of each.

        Two views with the rows [0, 1] and [2] that add two rows and one see, of the six,

            [[1, 1, 0, 1, 0, 0],
             [1, 1, 0, 1, 1, 0],
             [0, 0, 1, 0, 0, 1]]
        """
        num_new = [len(call.token_ids) for _, call in calls]
        self._make_room(sum(num_new))
        first_row = self.model.num_rows
        ends = np.cumsum(num_new)
        mask = np.zeros((ends[-1], first_row + ends[-1]), dtype=np.bool_)
        logit_rows = []
        for (view, call), end, size in zip(calls, ends.tolist(), num_new, strict=True):
            begin = end - size
            mask[begin:end, view.rows] = call.mask[:, : view.num_rows]
            mask[begin:end, first_row + begin : first_row + end] = call.mask[:, view.num_rows :]
            logit_rows.append(call.logit_rows + begin)
        logits = self.model.forward(
            np.concatenate([call.token_ids for _, call in calls]),
            np.concatenate([call.positions for _, call in calls]),
            mask,
            np.concatenate(logit_rows),
        )
        for (view, _), end, size in zip(calls, ends.tolist(), num_new, strict=True):
            new_rows = np.arange(first_row + end - size, first_row + end)
            view.rows = np.concatenate([view.rows, new_rows])
        return _split(logits, np.cumsum([len(rows) for rows in logit_rows]).tolist())

    def _make_room(self, num_new: int) -> None:
        """Drop the unused rows if they are many, or if ``num_new`` rows do not fit beside them."""
        num_rows = self.model.num_rows
        is_live = np.zeros(num_rows, dtype=np.bool_)
        for view in self._views:
            is_live[view.rows] = True
        num_live = int(is_live.sum())
        is_full = self.max_rows is not None and num_rows + num_new > self.max_rows
        if num_rows - num_live <= (0 if is_full else MOST_UNUSED_ROWS + num_live // 4):
            return
        self._closed.clear()
        self.model.keep(np.flatnonzero(is_live))
        new_rows = is_live.cumsum() - 1  # by old row
        for view in self._views:
            view.rows = new_rows[view.rows]


def _split(logits: Logits, ends: list[int]) -> list[Logits]:
    """Return each call's part of the logits, whose rows end where ``ends`` says."""
    spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    if isinstance(logits, tuple):
        top_ids, top_logits, logsumexp, full = logits
        return [
            (
                top_ids[span],
                top_logits[span],
                logsumexp[span],
                None if full is None else FullLogitsPart(full, span.start, span.stop),
            )
            for span in spans
        ]
    return [logits[span] for span in spans]


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
