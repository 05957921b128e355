"""Rows of one engine's key/value cache, of one request or of several: append, keep, trim.

A request sees its rows through a ``CacheView``; the engine sees one cache and one mask, in which no
row of a view sees a row of another. Views whose tokens begin alike share the rows of their common
prefix. A view gives rows up at no cost; the engine drops them together, before a call, when they
are many or there is too little room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.cache_view import CacheView, PrefixCache, Rows, UsedRows
from dsbd_ort.decoding.feature_models import forward_of_calls, reads_features, returns_features
from dsbd_ort.decoding.step_model import (
    EngineCall,
    GatheringModel,
    Logits,
    StepModel,
    WholeLogits,
    gathered_parts,
    gathers_logits,
    joined_gather,
    keeps_full_logits,
    logits_of_rows,
    num_top_logits,
    summed_rows,
)

PREFILL_CHUNK = 256
"""Prompt rows per call: bounds the mask at PREFILL_CHUNK x capacity."""

MOST_UNUSED_ROWS = 64
"""Rows that no view sees may lie between the others, and besides them a quarter of the others: an
unused row costs a masked column, dropping it moves those behind it in every transformer layer."""

_MOST_CLOSED = 256
"""Closed views whose rows may serve a request that begins alike."""


class KVCache:
    """The key/value cache of one engine.

    Attributes:
        model: the engine, whose cache is used for nothing else.
        vocab_size, num_top_logits, keeps_full_logits, gathers_logits: see StepModel.
        returns_features, reads_features: see ``feature_models``.
        max_rows: most rows that it may hold, None for no limit.
    """

    def __init__(
        self, model: StepModel, max_rows: int | None = None, *, shares_prefixes: bool = True
    ) -> None:
        """Take an engine; without ``shares_prefixes`` no view begins with rows of another."""
        self.model = model
        self.vocab_size = model.vocab_size
        self.num_top_logits = num_top_logits(model)
        self.keeps_full_logits = keeps_full_logits(model)
        self.gathers_logits = gathers_logits(model)
        self.returns_features = returns_features(model)
        self.reads_features = reads_features(model)
        self.max_rows = max_rows
        self._shares_prefixes = shares_prefixes
        self._views: list[UsedRows] = []
        self._closed: list[PrefixCache] = []  # oldest first
        self._next_check = 0  # so many rows may be there before the unused are counted
        self._told = np.zeros((2, max(model.num_rows, 256)), dtype=np.int64)  # see ``told``

    @property
    def num_views(self) -> int:
        """Views whose rows are there, the closed ones included."""
        return len(self._views) + len(self._closed)

    @property
    def num_used(self) -> int:
        """Rows that an open view sees."""
        return int(self._used().sum())

    def open_view(self, prefix: PrefixCache) -> CacheView:
        """Return a view that begins with the rows of ``prefix``, which is kept valid."""
        view = CacheView(self, prefix)
        num_tokens = len(prefix.tokens)
        rows = prefix.rows[:num_tokens]  # of another KVCache of the engine, as a rule
        self._told[0, rows], self._told[1, rows] = prefix.tokens, np.arange(num_tokens)
        self.add(view)
        return view

    def add(self, rows: UsedRows) -> None:
        """Keep these rows until they are closed or removed."""
        self._views.append(rows)
        self._next_check = 0

    def remove(self, rows: UsedRows) -> None:
        """Keep these rows no longer."""
        self._views.remove(rows)
        self._next_check = 0

    def longest_prefix(self, token_ids: Sequence[int]) -> PrefixCache:
        """Return a copy of the longest prefix of ``token_ids`` of any view."""
        tokens, longest, num_common = list(token_ids), PrefixCache(), 0
        others = (*(view.prefix for view in self._views), *self._closed)
        for other in others if self._shares_prefixes else ():
            if (found := other.num_common(tokens)) > num_common:
                longest, num_common = other, found
        return longest.copy_of(num_common)

    def close_view(self, view: UsedRows) -> None:
        """Give up a view's rows; until dropped its prefix may serve a request that begins alike.

        One that has been removed has none.
        """
        if view not in self._views:
            return
        self.remove(view)
        if view.prefix.tokens:
            self._closed.append(view.prefix)
            del self._closed[:-_MOST_CLOSED]

    def told(self, rows: Rows) -> NDArray[np.int64]:
        """Return tokens and positions of these rows, (2, n) int64."""
        return self._told[:, rows]

    def has_room(self, num_new: int) -> bool:
        """Return whether so many rows fit beside those in use."""
        if self.max_rows is None or self.model.num_rows + num_new <= self.max_rows:
            return True
        return self.num_used + num_new <= self.max_rows

    def forward(self, calls: Sequence[EngineCall]) -> list[Logits]:
        """Make the calls of several views in one forward of the engine; return the logits of each.

        Where one has a ``gather``, the others have one too or no logit rows.

        Two views with the rows [0, 1] and [2] that add two rows and one see, of the six,

            [[1, 1, 0, 1, 0, 0],
             [1, 1, 0, 1, 1, 0],
             [0, 0, 1, 0, 0, 1]]
        """
        sizes = [len(call.token_ids) for call in calls]
        self._make_room(sum(sizes))
        first_row = self.model.num_rows
        self._tell(calls, first_row)
        token_ids, positions, logit_rows, mask = _joined(calls, sizes, first_row)
        inputs = token_ids, positions, mask, logit_rows
        gathers = any(call.gather is not None for call in calls)
        gather = joined_gather(calls) if gathers else None
        logits: Any
        if any(call.features is not None for call in calls):
            logits = forward_of_calls(self.model, calls, *inputs, gather)
        elif gather is not None:
            logits = cast(GatheringModel, self.model).forward(*inputs, gather)
        else:
            logits = self.model.forward(*inputs)
        if gathers:
            return gathered_parts(logits, calls)
        whole = summed_rows(logits) if self.gathers_logits else cast(WholeLogits, logits)
        if len(calls) == 1:
            return [whole]
        ends = np.cumsum([len(call.logit_rows) for call in calls]).tolist()
        return [
            logits_of_rows(whole, end - len(call.logit_rows), end)
            for call, end in zip(calls, ends, strict=True)
        ]

    def _tell(self, calls: Sequence[EngineCall], first_row: int) -> None:
        """Remember tokens and positions of the new rows."""
        for call in calls:
            end = first_row + len(call.token_ids)
            if end > self._told.shape[1]:
                larger = np.zeros((2, 2 * end), dtype=np.int64)
                larger[:, :first_row] = self._told[:, :first_row]
                self._told = larger
            self._told[0, first_row:end], self._told[1, first_row:end] = (
                call.token_ids,
                call.positions,
            )
            first_row = end

    def trim(self) -> None:
        """Drop all rows that no view sees."""
        self._keep(self._used())

    def _make_room(self, num_new: int) -> None:
        """Drop the unused rows if they are many, or if ``num_new`` rows do not fit beside them."""
        num_rows = self.model.num_rows
        is_full = self.max_rows is not None and num_rows + num_new > self.max_rows
        if num_rows <= self._next_check and not is_full:
            return
        is_used = self._used()
        num_used = int(is_used.sum())
        most_unused = MOST_UNUSED_ROWS + num_used // 4
        self._next_check = num_used + most_unused
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
        self.model.keep(kept)
        self._told[:, : len(kept)] = self._told.take(kept, axis=1)
        new_rows = is_used.cumsum() - 1
        for view in self._views:
            view.renumber(kept, new_rows)


def _joined(
    calls: Sequence[EngineCall], sizes: list[int], first_row: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return tokens, positions, logit rows and mask of calls that share a forward."""
    if len(calls) == 1:
        (call,) = calls
        return call.token_ids, call.positions, call.logit_rows, call.mask(first_row)
    ends = np.cumsum(sizes)
    mask = np.zeros((ends[-1], first_row + ends[-1]), dtype=np.bool_)
    for call, end, size in zip(calls, ends.tolist(), sizes, strict=True):
        mask[end - size : end, : first_row + end] = call.mask(first_row + end - size)
    begins = ends - sizes
    logit_rows = [call.logit_rows + begin for call, begin in zip(calls, begins, strict=True)]
    return (
        np.concatenate([call.token_ids for call in calls]),
        np.concatenate([call.positions for call in calls]),
        np.concatenate(logit_rows),
        mask,
    )
