"""Costs of the engine calls of one request, as known just now: of shared calls its share."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.cost_curve import FREE, CostCurve, Costs, EngineCosts
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK

Floats = NDArray[np.float64]
LOOK_AHEAD = 6
"""Layers behind the next one that are thought of."""


class RequestCosts:
    """Seconds of the calls of a request, by rows; what ``refresh`` found last.

    Attributes:
        target: (room,) float64. Of a target call by its rows, 0 of none. Rows beyond the most that
            a request can have cost as much as these: more are pending only after a restart.
        seconds: the same as plain numbers, which are looked up one by one.
        most_rows: of the largest target call of a request.
        usual: seconds of the target's call in an iteration without a draft.
        usual_draft: of a draft call of as many rows as there are beams.
        target_row: of a target call of one row that the request shares with none.
        num_sharers: requests that share the calls.
        are_learned: whether calls teach them.
        most_known: rows of the largest target call whose cost may be relied on.
    """

    def __init__(
        self,
        costs: Costs,
        num_sharers: Callable[[], int],
        *,
        num_beams: int,
        most_rows: int,
        most_beams: int,
        has_draft_model: bool,
    ) -> None:
        """Take the costs of the pair.

        Args:
            costs: of both engines.
            num_sharers: returns how many requests share the engine calls just now.
            num_beams: beams of the request.
            most_rows: of a target call.
            most_beams: candidates of a layer.
            has_draft_model: whether any draft costs an engine call.
        """
        self._costs = costs
        self._sharers_now = num_sharers
        self._num_beams = num_beams
        self.most_rows, self._most_beams = most_rows, most_beams
        self._has_draft_model = has_draft_model
        self._known: tuple[EngineCosts | None, int] = None, 0
        self.refresh()

    def refresh(self) -> None:
        """Look what calls cost now."""
        costs, num_sharers = self._costs.now(), self._sharers_now()
        if costs is self._known[0] and num_sharers == self._known[1]:  # as a rule
            return
        self._known = costs, num_sharers
        self.num_sharers, self._reading = num_sharers, costs
        self.target_row = costs.target.seconds[0]
        self.are_learned = costs.target.seen is not None
        draft = costs.draft if self._has_draft_model else FREE
        shape = self.most_rows, self._most_beams
        self.target, self.seconds, self._draft = _shares(costs.target, draft, *shape, num_sharers)
        self.usual, self.usual_draft = self.seconds[self._num_beams], self.draft(self._num_beams)
        self._ahead: tuple[int, Floats] | None = None
        self.most_known = self.most_rows
        if costs.target.seen is not None and not self._has_draft_model:
            # Drafts without a model begin before the costs of large calls are known: no more than
            # twice the rows that were seen.
            fewest, most = costs.target.seen
            is_base_known = fewest <= num_sharers * self._num_beams
            self.most_known = 2 * most // num_sharers if is_base_known else 0

    def rows(self, num_rows: int, num_new: int) -> float:
        """Return the seconds that further rows add to a target call."""
        last, most = num_rows + num_new, self.most_rows
        return self.seconds[last if last < most else most] - self.seconds[num_rows]

    def draft(self, num_rows: int) -> float:
        """Return the seconds of a draft call; 0 rows need none."""
        return self._draft[num_rows if num_rows < self.most_rows else self.most_rows]

    def reading(self, num_unread: int, num_unread_source: int) -> float:
        """Return the seconds in which the draft model reads so much of prompt and source."""
        if not self._has_draft_model or not (num_unread or num_unread_source):
            return 0.0
        seconds = _seconds_of_prompt(self._reading.draft, num_unread)
        if num_unread_source:
            seconds += _seconds_of_source(self._reading.source, num_unread_source)
        return seconds

    def rows_ahead(self, width: int) -> Floats:
        """Return what further layers of a width add to target calls of so many rows.

        (room, LOOK_AHEAD + 1) float64, by rows before them and by their number.
        """
        if self._ahead is None or self._ahead[0] != width:
            last = len(self.target) - 1
            rows = np.add.outer(np.arange(last + 1), width * np.arange(LOOK_AHEAD + 1))
            self._ahead = width, self.target[np.minimum(rows, last)] - self.target[:, None]
        return self._ahead[1]


@lru_cache(maxsize=256)  # the same few come in every request
def _shares(
    target: CostCurve, draft: CostCurve, most_rows: int, most_beams: int, num_sharers: int
) -> tuple[Floats, tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of a target call, (room,), twice, and of a draft call, by rows."""
    seconds = np.pad(target.up_to(most_rows, num_sharers), (0, most_beams + 1), mode="edge")
    seconds.flags.writeable = False
    of_draft = draft.up_to(most_rows, num_sharers)
    return seconds, tuple(seconds.tolist()), tuple(of_draft.tolist())


@lru_cache(maxsize=256)
def _seconds_of_prompt(draft: CostCurve, num_rows: int) -> float:
    """Return the seconds in which the draft model reads so many rows of a prompt."""
    seconds = draft.up_to(PREFILL_CHUNK)
    num_whole, rest = divmod(num_rows, PREFILL_CHUNK)
    return num_whole * float(seconds[-1]) + float(seconds[rest])


@lru_cache(maxsize=256)
def _seconds_of_source(source: CostCurve, num_tokens: int) -> float:
    """Return the seconds in which the draft model reads a source."""
    return float(source.up_to(num_tokens)[-1])
