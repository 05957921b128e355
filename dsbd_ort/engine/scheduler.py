"""Admission of requests to the engine: first come, first served, within a bounded cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsbd_ort.engine.errors import QueueFullError
from dsbd_ort.engine.live_request import LiveRequest
from dsbd_ort.number_checks import MOST_BYTES, check_count
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.kv_cache import bucket_capacity, row_bytes

_DEFAULT_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits of a service.

    Attributes:
        max_requests: that run at a time; they share the engine calls.
        max_queued: that wait beyond those; one more is rejected.
        kv_bytes: of the caches of both engines (one of their buffers is there twice for a moment
            when they grow). None: enough for max_requests requests of 2,048 rows, and for one of
            the whole context.
    """

    max_requests: int = 8
    max_queued: int = 64
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        check_count("max_requests", self.max_requests, 1)
        check_count("max_queued", self.max_queued, 0)
        if self.kv_bytes is not None:
            check_count("kv_bytes", self.kv_bytes, 1, MOST_BYTES)


def cache_rows(limits: ServiceLimits, bundle: Bundle) -> int:
    """Return the rows that each engine's cache may hold.

    Caches grow in steps (``bucket_capacity``): the largest step within ``kv_bytes``.

    Raises:
        InputError: ``kv_bytes`` is less than the smallest caches take.
    """
    if limits.kv_bytes is None:
        wanted = max(limits.max_requests * _DEFAULT_ROWS, 2 * bundle.context_length)
        return bucket_capacity(wanted)
    bytes_of_row = sum(row_bytes(entry.kv) for entry in bundle.entry_by_role.values())
    affordable = limits.kv_bytes // bytes_of_row
    rows = 0
    while (bucket := bucket_capacity(rows + 1)) <= affordable:
        rows = bucket
    if rows == 0:
        least = bucket_capacity(1) * bytes_of_row
        raise InputError(
            f"kv_bytes is {limits.kv_bytes}, but the smallest caches of this bundle take {least} "
            "bytes; raise it"
        )
    return rows


class Scheduler:
    """A queue in front of a bounded number of running requests and of cache rows.

    A request is admitted once the rows that it may need at most are free, so none is ever
    preempted for want of memory. No request overtakes the first of the queue, so that one with many
    rows does not starve.

    Attributes:
        max_rows: of the cache.
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
