"""Seconds of the engine calls of one request by their rows; of shared calls its share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.cost_curve import FREE, Costs, EngineCosts
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK

Floats = NDArray[np.float64]
LOOK_AHEAD = 6
"""Layers after the next one whose gain is estimated."""


class RequestCosts:
    """Seconds of calls, by rows, as ``refresh`` has found them last.

    Args and attributes:
        num_beams, most_beams: beams of the request, most candidates of a layer.
        most_rows: of the largest target call; calls beyond it (after a restart) cost as much.
        has_draft_model: whether drafts cost engine calls.
        target: (room,) float64. Of a target call; 0 for 0 rows.
        seconds, draft: lists of numbers, which are looked up one by one, by 0 to ``most_rows``
            rows: of target and draft calls.
        row: of a target call of one row that is not shared.
        num_sharers: requests that share the calls.
        are_learned: whether calls teach them.
        most_known: rows of the largest target call whose cost is known well enough for a draft.
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
        self._costs, self._sharers_now = costs, num_sharers
        self.num_beams, self.most_rows, self.most_beams = num_beams, most_rows, most_beams
        self.has_draft_model = has_draft_model
        self._known: EngineCosts | None = None
        self.num_sharers = 0
        self.refresh()

    def refresh(self) -> None:
        """Look up what calls cost now."""
        costs, num_sharers = self._costs.now(), self._sharers_now()
        if costs is self._known and num_sharers == self.num_sharers:  # usually
            return
        self._known, self.num_sharers = costs, num_sharers
        self.row = costs.target.seconds[0]
        seconds = costs.target.up_to(self.most_rows, num_sharers)
        self.target = np.pad(seconds, (0, self.most_beams + 1), mode="edge")
        self.seconds: list[float] = seconds.tolist()
        draft = costs.draft if self.has_draft_model else FREE
        self.draft: list[float] = draft.up_to(self.most_rows, num_sharers).tolist()
        self._ahead: dict[int, Floats] = {}
        self.most_known, seen = self.most_rows, costs.target.seen
        self.are_learned = seen is not None
        if seen is not None and not self.has_draft_model:
            # Drafts without a model begin before the costs of large calls are known: no more than
            # twice the rows that were seen.
            is_base_known = seen[0] <= num_sharers * self.num_beams
            self.most_known = 2 * seen[1] // num_sharers if is_base_known else 0

    def reading(self, num_unread: int, num_unread_source: int) -> float:
        """Return the seconds in which the draft model reads so much of prompt and source."""
        if self._known is None or not (num_unread or num_unread_source):
            return 0.0
        seconds = self._known.draft.up_to(PREFILL_CHUNK)
        num_whole, rest = divmod(num_unread, PREFILL_CHUNK)
        source = self._known.source.up_to(num_unread_source)[-1]
        return float(num_whole * seconds[-1] + seconds[rest] + source)

    def rows_ahead(self, width: int) -> Floats:
        """Return the seconds that further layers of a width add to target calls.

        (room, LOOK_AHEAD + 1) float64, by rows before them and by their number.
        """
        if width not in self._ahead:
            last = len(self.target) - 1
            rows = np.add.outer(np.arange(last + 1), width * np.arange(LOOK_AHEAD + 1))
            self._ahead[width] = self.target[np.minimum(rows, last)] - self.target[:, None]
        return self._ahead[width]
