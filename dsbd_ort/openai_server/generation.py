"""The engine requests of one HTTP request: begun together, heard together, cancelled together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

from dsbd_errors import DsbdError
from dsbd_ort.engine import LiveRequest, ServiceEvent
from dsbd_ort.generated import GenerationResult, StreamStep
from dsbd_ort.openai_server.engine_service import EngineService
from dsbd_ort.openai_server.errors import failure_of, refusal_of
from dsbd_ort.openai_server.metrics import RequestMeter
from dsbd_ort.openai_server.planner import Submission
from dsbd_ort.openai_server.refusal import Refusal, bad_request


class Generation:
    """What goes on for one HTTP request.

    The engine never waits for its client: events gather in a queue, no more of them than tokens
    were asked for.
    """

    def __init__(self, service: EngineService, meter: RequestMeter, timeout_s: float) -> None:
        """Make ready, in the event loop that will hear the events; ``timeout_s`` begins now."""
        self._service = service
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._deadline = self._loop.time() + timeout_s
        self._events: asyncio.Queue[tuple[int, ServiceEvent]] = asyncio.Queue()
        self._live: list[LiveRequest] = []
        self._num_over = 0

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Begin all of them or none; in any thread.

        Raises:
            Refusal: the service does not take one, or could never take all.
        """
        limits = self._service.limits
        most = limits.max_requests + limits.max_queued
        if len(submissions) > most:
            raise bad_request(
                f"prompts and n make {len(submissions)} engine requests, this server holds {most} "
                "at a time; send fewer prompts, or a smaller n",
                "prompt",
                "limit_exceeded",
            )
        try:
            for index, submission in enumerate(submissions):
                live = self._service.submit(
                    submission.token_ids, submission.options, partial(self._hear, index)
                )
                self._live.append(live)
        except DsbdError as error:
            self.close()
            raise refusal_of(error) from error

    def close(self) -> None:
        """Cancel what is not over; may be called again."""
        if self._num_over < len(self._live):
            self._meter.cancelled()
        for live in self._live:
            live.cancel()
        self._num_over = len(self._live)

    async def events(self) -> AsyncIterator[tuple[int, StreamStep | GenerationResult]]:
        """Yield the index of a submission and what comes of it, until all have their results.

        Raises:
            Refusal: one failed or was cancelled, or the time is over.
        """
        while self._num_over < len(self._live):
            try:
                async with asyncio.timeout_at(self._deadline):
                    index, event = await self._events.get()
            except TimeoutError as error:
                raise Refusal(
                    504,
                    f"no answer within the {self._timeout_s:g} s that this server allows; ask for "
                    "fewer tokens",
                    code="timeout",
                ) from error
            if isinstance(event, StreamStep):
                self._meter.step(index, event)
            elif isinstance(event, GenerationResult):
                self._num_over += 1
                self._meter.result(event)
            else:
                self._num_over += 1
                raise failure_of(event)
            yield index, event

    def _hear(self, index: int, event: ServiceEvent) -> None:
        """Take an event in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
