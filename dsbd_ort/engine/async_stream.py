"""Pieces of one request for asyncio: an async iterator over events of the engine loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from dsbd_ort.engine.errors import ServiceClosedError
from dsbd_ort.engine.scheduler import Cancelled, Ending, LiveRequest, ServiceEvent
from dsbd_ort.results import GenerationResult, StreamPiece

Submit = Callable[[Callable[[ServiceEvent], None]], LiveRequest]
"""Submits a request whose events go to the function given."""


def result_or_raise(ending: Ending) -> GenerationResult:
    """Return the result with which a request ended.

    Raises:
        ServiceClosedError: it was cancelled, because the service was closed.
        DsbdError: the request failed.
    """
    if isinstance(ending, GenerationResult):
        return ending
    if isinstance(ending, Cancelled):
        raise ServiceClosedError("the service was closed before the request ended")
    raise ending


class AsyncStream:
    """The stream pieces of a request, which is submitted with the first ``anext``.

    ``aclose`` and the cancellation of the task that waits for a piece cancel the request.

    Attributes:
        result: once the pieces have ended; None before.
    """

    result: GenerationResult | None = None

    def __init__(self, submit: Submit) -> None:
        """Take what submits the request; it may take its time, so it is called in a thread."""
        self._events = _events_of(submit)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamPiece:
        """Return the next piece.

        Raises ``StopAsyncIteration`` at the end, and what ``Service.submit`` raises.
        """
        event = await anext(self._events)
        if isinstance(event, StreamPiece):
            return event
        self.result = result_or_raise(event)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        await self._events.aclose()


async def _events_of(submit: Submit) -> AsyncGenerator[ServiceEvent, None]:
    """Yield the events of a request, which is cancelled where they are not read to the end."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[ServiceEvent] = asyncio.Queue()

    def on_event(event: ServiceEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and nothing waits
            loop.call_soon_threadsafe(events.put_nowait, event)

    submission = asyncio.ensure_future(asyncio.to_thread(submit, on_event))
    try:
        await asyncio.shield(submission)
        while True:
            event = await events.get()
            yield event
            if not isinstance(event, StreamPiece):
                return
    finally:
        submission.add_done_callback(_cancel)  # also where it is under way in its thread


def _cancel(submission: asyncio.Future[LiveRequest]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        submission.result().cancel()
