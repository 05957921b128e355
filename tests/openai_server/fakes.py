"""A Service without an engine: a test scripts its events."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.engine import (
    Cancelled,
    QueueFullError,
    ServiceClosedError,
    ServiceEvent,
    ServiceLimits,
    ServiceStats,
)

Script = Callable[[], Iterator[ServiceEvent]]


@dataclass
class FakeRequest:
    num_prompt_tokens: int
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.is_cancelled.set()


class ScriptedService:
    """Every request gets the events of ``script``, in a thread of its own, then waits for its end.

    After ``num_taken`` requests the queue is full.
    """

    def __init__(self, pipeline: Pipeline, script: Script, num_taken: int = 100) -> None:
        self.pipeline = pipeline
        self.limits = ServiceLimits()
        self.requests: list[FakeRequest] = []
        self._script = script
        self._num_taken = num_taken
        self._is_closed = False

    def submit(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        on_event: Callable[[ServiceEvent], None],
        *,
        caller: str = "",
    ) -> FakeRequest:
        if self._is_closed:
            raise ServiceClosedError("the service is closed")
        if len(self.requests) >= self._num_taken:
            raise QueueFullError("the queue is full")
        request = FakeRequest(len(prompt))
        self.requests.append(request)
        threading.Thread(target=self._answer, args=(request, on_event), daemon=True).start()
        return request

    def _answer(self, request: FakeRequest, on_event: Callable[[ServiceEvent], None]) -> None:
        for event in self._script():
            if request.is_cancelled.is_set():
                break
            on_event(event)
            if isinstance(event, DsbdError | Cancelled):
                return
        request.is_cancelled.wait(30)
        on_event(Cancelled())

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def most_new_tokens(self, num_prompt_tokens: int, config: DecodingConfig) -> int:
        return 64

    def stats(self) -> ServiceStats:
        running = sum(not request.is_cancelled.is_set() for request in self.requests)
        return ServiceStats(
            num_running=running,
            num_waiting=0,
            rows_in_use=30,
            rows_reserved=50,
            max_rows=120,
            kv_bytes=4096,
            num_preemptions=7,
        )

    def close(self, *, drain: bool = True) -> None:
        self._is_closed = True
        for request in self.requests:
            request.cancel()
