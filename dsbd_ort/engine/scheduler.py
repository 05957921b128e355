"""Requests of a service and their admission: first come, first served, within a bounded cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.engine.errors import QueueFullError
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.results import GenerationResult, StreamPiece, TextStream
from dsbd_runtime.errors import CapacityError


@dataclass(frozen=True)
class Cancelled:
    """The request was cancelled, by its caller or because the service was closed."""


Ending = GenerationResult | DsbdError | Cancelled
"""The last event of a request."""

ServiceEvent = StreamPiece | Ending


@dataclass(eq=False, kw_only=True)
class LiveRequest:
    """A request that waits, runs or has ended.

    Attributes:
        request: the decoding request.
        texts: turns its iterations into stream pieces.
        num_rows: the most cache rows that it may need.
        on_event: called with each of its events.
        wake: makes the engine loop look for cancelled requests.
        is_cancelled: whether its caller has cancelled it.
    """

    request: DecodingRequest = field(repr=False)
    texts: TextStream = field(repr=False)
    num_rows: int
    on_event: Callable[[ServiceEvent], None] = field(repr=False)
    wake: Callable[[], None] = field(repr=False)
    is_cancelled: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    def cancel(self) -> None:
        """Cancel it, from any thread: it ends before the next engine call."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.wake()


class Scheduler:
    """A queue in front of a bounded number of running requests and of cache rows.

    A request is admitted once the most rows that it may need are free, so no running request is
    ever preempted. No request overtakes the first of the queue, so that one with many rows does not
    starve.

    Attributes:
        max_rows: rows that the cache may hold.
        waiting: requests in the order of their arrival.
        running: requests admitted and not released.
    """

    def __init__(self, limits: ServiceLimits, max_rows: int) -> None:
        self._limits = limits
        self.max_rows = max_rows
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []

    @property
    def rows_reserved(self) -> int:
        """Rows that the running requests may need."""
        return sum(request.num_rows for request in self.running)

    def enqueue(self, request: LiveRequest) -> None:
        """Append a request to the queue.

        Raises:
            CapacityError: it needs more rows than there are.
            QueueFullError: too many requests are waiting.
        """
        if request.num_rows > self.max_rows:
            raise CapacityError(
                f"the request may need {request.num_rows} cache rows ({request.num_prompt_tokens} "
                f"of them for the prompt), the service has {self.max_rows}; use fewer beams or new "
                "tokens, a shorter draft or prompt"
            )
        limits, num_running, num_waiting = self._limits, len(self.running), len(self.waiting)
        if num_running + num_waiting >= limits.max_requests + limits.max_queued:
            raise QueueFullError(
                f"the queue is full: {num_running} requests are running and {num_waiting} are "
                f"waiting, the limits are {limits.max_requests} and {limits.max_queued}; try again "
                "later"
            )
        self.waiting.append(request)

    def admit(self) -> LiveRequest | None:
        """Move the first of the queue to the running requests; None if it must wait."""
        if not self.waiting or not self._fits(self.waiting[0]):
            return None
        request = self.waiting.popleft()
        self.running.append(request)
        return request

    def remove_cancelled(self) -> list[LiveRequest]:
        """Remove cancelled requests from the queue; return them."""
        cancelled = [request for request in self.waiting if request.is_cancelled]
        for request in cancelled:
            self.waiting.remove(request)
        return cancelled

    def release(self, request: LiveRequest) -> None:
        """Remove a running request; its rows are free again."""
        self.running.remove(request)

    def _fits(self, request: LiveRequest) -> bool:
        has_place = len(self.running) < self._limits.max_requests
        return has_place and self.rows_reserved + request.num_rows <= self.max_rows
