"""The cache of one engine, its rows shared out among requests: one call computes rows of all.

A request sees its own rows alone, through a ``Lane``; the engine sees one cache and one mask, in
which no row of a lane sees one of another. Lanes whose tokens begin alike share the rows of what
they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.cached_prefix import CachedPrefix
from dsbd_ort.decoding.step_model import EngineCall, Logits, StepModel, num_top_logits

MOST_DEAD = 64
"""Rows of no lane that may lie between the others, and besides them a quarter of the others: a
dead row costs a masked column, moving the rows behind it a copy in every layer."""


class Lane:
    """One request's share of a pool: a RowCache with rows of its own.

    Attributes:
        pool: what it is a share of.
        rows: (num_rows,) int64 increasing. Its rows of the engine's cache.
        prefix: the tokens of the first of them.
    """

    def __init__(self, pool: RowPool, rows: NDArray[np.int64], prefix: CachedPrefix) -> None:
        self.pool = pool
        self.rows = rows
        self.prefix = prefix

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.pool.model.vocab_size

    @property
    def num_rows(self) -> int:
        """Rows of this lane."""
        return len(self.rows)

    @property
    def num_top_logits(self) -> int:
        """See StepModel."""
        return num_top_logits(self.pool.model)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """See RowCache.keep; dropped rows stay in the engine's cache until they are in the way."""
        self.rows = self.rows[rows]


class RowPool:
    """An engine whose cache holds the rows of several lanes.

    Attributes:
        model: the engine.
        max_rows: most rows that its cache may hold, None for no limit.
    """

    def __init__(
        self, model: StepModel, max_rows: int | None = None, *, shares_prefixes: bool = True
    ) -> None:
        """Take an engine; the rows in its cache are nobody's.

        Without ``shares_prefixes`` no lane begins with rows of another.
        """
        self.model = model
        self.max_rows = max_rows
        self._shares_prefixes = shares_prefixes
        self._lanes: list[Lane] = []
        self._closed: list[Lane] = []  # their rows are there until the next clearing up

    @property
    def num_lanes(self) -> int:
        """Lanes whose rows are there, the closed ones among them."""
        return len(self._lanes) + len(self._closed)

    def open_lane(self, token_ids: Sequence[int]) -> Lane:
        """Return a lane that begins with the rows that any other holds of ``token_ids``."""
        rows, tokens = np.arange(0), list(token_ids)
        num_common = 0
        others = (*self._lanes, *self._closed) if self._shares_prefixes else ()
        for other in others:
            if (found := other.prefix.num_common(tokens)) > num_common:
                rows, num_common = other.rows[:found], found
        lane = Lane(self, rows, CachedPrefix(tokens[:num_common]))
        self._lanes.append(lane)
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Let go of a lane's rows; they may serve others until they are in the way."""
        self._lanes.remove(lane)
        if lane.prefix.tokens:
            self._closed.append(lane)

    def run(self, calls: Sequence[tuple[Lane, EngineCall]]) -> list[Logits]:
        """Make the calls of several lanes in one call of the engine; return the logits of each.

        Two lanes with the rows [0, 1] and [2] that add two rows and one see, of the six,

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
        for (lane, call), end, size in zip(calls, ends.tolist(), num_new, strict=True):
            begin = end - size
            mask[begin:end, lane.rows] = call.mask[:, : lane.num_rows]
            mask[begin:end, first_row + begin : first_row + end] = call.mask[:, lane.num_rows :]
            logit_rows.append(call.logit_rows + begin)
        logits = self.model.forward(
            np.concatenate([call.token_ids for _, call in calls]),
            np.concatenate([call.positions for _, call in calls]),
            mask,
            np.concatenate(logit_rows),
        )
        for (lane, _), end, size in zip(calls, ends.tolist(), num_new, strict=True):
            new_rows = np.arange(first_row + end - size, first_row + end)
            lane.rows = np.concatenate([lane.rows, new_rows])
        return _split(logits, np.cumsum([len(rows) for rows in logit_rows]).tolist())

    def _make_room(self, num_new: int) -> None:
        """Drop dead rows where there are many, or no room for ``num_new`` without."""
        num_rows = self.model.num_rows
        is_live = np.zeros(num_rows, dtype=np.bool_)
        for lane in self._lanes:
            is_live[lane.rows] = True
        num_live = int(is_live.sum())
        is_full = self.max_rows is not None and num_rows + num_new > self.max_rows
        if num_rows - num_live <= (0 if is_full else MOST_DEAD + num_live // 4):
            return
        self._closed.clear()
        self.model.keep(np.flatnonzero(is_live))
        new_rows = is_live.cumsum() - 1  # by old row
        for lane in self._lanes:
            lane.rows = new_rows[lane.rows]


def _split(logits: Logits, ends: list[int]) -> list[Logits]:
    """Return each call's part of the logits, whose rows end where ``ends`` says."""
    spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    if isinstance(logits, tuple):
        top_ids, top_logits, logsumexp = logits
        return [(top_ids[span], top_logits[span], logsumexp[span]) for span in spans]
    return [logits[span] for span in spans]
