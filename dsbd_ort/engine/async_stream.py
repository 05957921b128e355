"""Events of engine threads for asyncio: a queue, and the stream of one request's pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from dsbd_errors import DsbdError
from dsbd_ort.engine.errors import ServiceClosedError
from dsbd_ort.engine.scheduler import Cancelled, ServiceEvent, Submission
from dsbd_ort.requests.results import GenerationResult, StreamPiece

Submit = Callable[[Callable[[ServiceEvent], None]], Submission]
"""Submits a request whose events go to the function given."""

Event = TypeVar("Event")
Result = TypeVar("Result")


class AsyncEvents(Generic[Event]):
    """Events of other threads, in order, for the event loop that is running."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Append an event, in any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and nothing waits
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self) -> Event:
        return await self._queue.get()


def result_or_raise(ending: Result | DsbdError | Cancelled) -> Result:
    """Return the result with which a request, or a transcription, ended; raise its DsbdError.

    ServiceClosedError: it was cancelled, because the service was closed.
    """
    if isinstance(ending, Cancelled):
        raise ServiceClosedError("the service was closed before the request ended")
    if isinstance(ending, DsbdError):
        raise ending
    return ending


class AsyncStream:
    """The stream pieces of a request, which is submitted with the first ``anext``.

    ``aclose`` cancels the request, as does cancelling the task that waits for a piece.

    Attributes:
        result: the result of the request after its last piece; None before.
    """

    result: GenerationResult | None = None

    def __init__(self, submit: Submit) -> None:
        """``submit`` may take long, so it is called in a thread."""
        self._events = _events_of(submit)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamPiece:
        """Return the next piece; raises the errors of ``Service.submit``."""
        event = await anext(self._events)
        if isinstance(event, StreamPiece):
            return event
        self.result = result_or_raise(event)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        await self._events.aclose()


async def _events_of(submit: Submit) -> AsyncGenerator[ServiceEvent, None]:
    """Yield the events of a request; cancel it if they are not read to the end."""
    events: AsyncEvents[ServiceEvent] = AsyncEvents()
    submission = asyncio.ensure_future(asyncio.to_thread(submit, events.put))
    try:
        await asyncio.shield(submission)
        while True:
            event = await events.get()
            yield event
            if not isinstance(event, StreamPiece):
                return
    finally:
        submission.add_done_callback(_cancel)  # also if it is still running in its thread


def _cancel(submission: asyncio.Future[Submission]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        submission.result().cancel()
