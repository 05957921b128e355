"""Who is live and who waits: first come, first served, within the rows that there are."""

from __future__ import annotations

from collections import deque

from dsbd_ort.engine.errors import QueueFullError
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.live_request import LiveRequest
from dsbd_runtime.errors import CapacityError


class Admission:
    """A queue in front of a bounded number of places and rows.

    A request is admitted once there are rows for the most that it can ever need, so that nobody
    has to leave for want of memory. Nobody overtakes the first in the queue, who therefore gets
    its turn, however much it needs.

    Attributes:
        waiting: requests in the order they came.
        live: those admitted and not released.
    """

    def __init__(self, limits: ServiceLimits, max_rows: int) -> None:
        self._limits = limits
        self.max_rows = max_rows
        self.waiting: deque[LiveRequest] = deque()
        self.live: list[LiveRequest] = []

    @property
    def rows_reserved(self) -> int:
        """Rows that the live requests may need."""
        return sum(request.num_rows for request in self.live)

    def enqueue(self, request: LiveRequest) -> None:
        """Let a request wait for its turn.

        Raises:
            CapacityError: it would wait for ever.
            QueueFullError: too many wait already.
        """
        if request.num_rows > self.max_rows:
            raise CapacityError(
                f"the request may need {request.num_rows} cache rows ({request.num_prompt_tokens} "
                f"of them for the prompt), the service has {self.max_rows}; ask for fewer beams or "
                "new tokens, a shorter draft or prompt"
            )
        limits = self._limits
        if len(self.live) + len(self.waiting) >= limits.max_requests + limits.max_queued:
            raise QueueFullError(
                f"{len(self.live)} requests are live and {len(self.waiting)} wait, no more than "
                f"{limits.max_requests} and {limits.max_queued} may; try again later"
            )
        self.waiting.append(request)

    def admit(self) -> LiveRequest | None:
        """Return the next request whose turn it is, live from now on; None if it must wait."""
        if not self.waiting or not self._has_room_for(self.waiting[0]):
            return None
        request = self.waiting.popleft()
        self.live.append(request)
        return request

    def withdraw_cancelled(self) -> list[LiveRequest]:
        """Return the waiting requests that were given up; they wait no more."""
        gone = [request for request in self.waiting if request.is_cancelled]
        for request in gone:
            self.waiting.remove(request)
        return gone

    def release(self, request: LiveRequest) -> None:
        """Give back the place and the rows of a live request."""
        self.live.remove(request)

    def _has_room_for(self, request: LiveRequest) -> bool:
        has_place = len(self.live) < self._limits.max_requests
        return has_place and self.rows_reserved + request.num_rows <= self.max_rows
