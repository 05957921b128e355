"""Lifecycle of a transcription request: its audio read, its windows decoded, the response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingError
from dsbd_ort.engine import Cancelled, LiveTranscription, QueueFullError, Service, SpeechEvent
from dsbd_ort.openai_server.errors import (
    ErrorResponse,
    bad_request,
    failure,
    rejection,
    unknown_model,
)
from dsbd_ort.openai_server.generation import Gate, TimedEvents, while_connected
from dsbd_ort.openai_server.metrics import Metrics
from dsbd_ort.openai_server.responses import EventStream
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.openai_server.speech_form import SpeechForm
from dsbd_ort.results import json_text
from dsbd_ort.speech.audio import SAMPLING_RATE, Samples, read_audio
from dsbd_ort.speech.formats import FORMATS, as_text
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_runtime.errors import InputError

T = TypeVar("T")


class TranscribedText(BaseModel):
    """The response in the format json."""

    text: str
    usage: dict[str, Any]


class TranscriptionHandler:
    """Responds to requests with audio, within the limits of a server.

    At most ``max_requests`` audios are decoded in memory at a time; the others wait as the bytes
    that were sent.
    """

    def __init__(
        self, service: Service, settings: ServingSettings, metrics: Metrics, gate: Gate
    ) -> None:
        self._service = service
        self._settings = settings
        self._metrics = metrics
        self._gate = gate
        self._places = asyncio.Semaphore(service.limits.max_requests)
        self._num_inside = 0

    async def respond(self, request: Request, form: SpeechForm, task: str) -> Response:
        """Return the transcript of an audio, or a stream; raise ErrorResponse if it fails."""
        if form.model != self._settings.model_name:
            raise unknown_model(form.model, self._settings.model_name)
        encoder = self._service.pipeline.prompts.encoder
        assert encoder is not None and encoder.speech is not None  # else it has no such route
        form.check(self._settings, encoder.speech)
        with contextlib.ExitStack() as on_end:
            on_end.enter_context(self._gate.passed())
            self._enter()
            on_end.callback(self._leave)
            work = _Transcription(self._service, self._metrics, self._settings.request_timeout_s)
            on_end.callback(work.close)
            options = form.options(task, self._settings.defaults)
            begun = self._begun(work, form, options, on_end)
            await while_connected(request.receive, begun)
            if form.stream:
                return EventStream(_streamed(work.events()), on_end.pop_all().close)
            transcript = await while_connected(request.receive, work.transcript())
            return _response(transcript, form.format)

    async def _begun(
        self,
        work: _Transcription,
        form: SpeechForm,
        options: dict[str, Any],
        on_end: contextlib.ExitStack,
    ) -> None:
        file, max_seconds = form.file.file, self._settings.max_audio_s

        def read(is_over: Callable[[], bool]) -> Samples:
            return read_audio(file, SAMPLING_RATE, max_seconds=max_seconds, is_cancelled=is_over)

        async with work.received.in_time():
            try:
                samples = await in_place(self._places, on_end, read)
            except InputError as error:
                raise bad_request(str(error), "file", "invalid_audio") from error
        await work.begin(samples, options)

    def _enter(self) -> None:
        limits = self._service.limits
        if self._num_inside >= limits.max_requests + limits.max_queued:
            message = f"the queue is full: it has {self._num_inside} audio files; try again later"
            raise rejection(QueueFullError(message))
        self._num_inside += 1

    def _leave(self) -> None:
        self._num_inside -= 1


async def in_place(
    places: asyncio.Semaphore, on_end: contextlib.ExitStack, work: Callable[[Callable[[], bool]], T]
) -> T:
    """Return the result of ``work``, which runs in a thread once a place is free.

    ``work`` receives a function that returns whether the request has ended (``on_end`` was closed):
    it should stop then. The place is released when both have ended.
    """

    def release(done: asyncio.Future[T]) -> None:
        places.release()
        if not done.cancelled():
            done.exception()  # retrieved, even if the request has ended

    await places.acquire()
    is_over = threading.Event()
    working = asyncio.ensure_future(asyncio.to_thread(work, is_over.is_set))
    on_end.callback(working.add_done_callback, release)
    on_end.callback(is_over.set)
    return await asyncio.shield(working)


class _Transcription:
    """One audio on its way through the service."""

    def __init__(self, service: Service, metrics: Metrics, timeout_s: float) -> None:
        """Call in the event loop that reads the events; ``timeout_s`` begins now."""
        self._service = service
        self._metrics = metrics
        self._arrived = metrics.clock()
        self.received: TimedEvents[SpeechEvent] = TimedEvents(timeout_s, "send a shorter audio")
        self._live: LiveTranscription | None = None
        self._is_over = False

    async def begin(self, samples: Samples, options: dict[str, Any]) -> None:
        """Submit the audio; in a thread, because its options are checked."""

        def submit() -> None:
            live = self._service.submit_audio(samples, options, self.received.put)
            self._live = live
            if self._is_over:  # ``close`` was called meanwhile
                live.cancel()

        try:
            await asyncio.to_thread(submit)
        except DsbdError as error:
            raise rejection(error) from error

    def close(self) -> None:
        was_over, self._is_over = self._is_over, True  # before ``submit`` reads it
        if self._live is not None and not was_over:
            self._metrics.count("dsbd:requests_cancelled")
            self._live.cancel()

    async def events(self) -> AsyncIterator[Segment | Transcript]:
        """Yield the segments and the transcript; raise ErrorResponse if it fails or is too late."""
        while not self._is_over:
            event = await self.received.get()
            if not isinstance(event, Segment):
                self._is_over = True
            if isinstance(event, DecodingError | InputError):
                raise rejection(event)
            if isinstance(event, DsbdError | Cancelled):
                raise failure(event)
            if isinstance(event, Transcript):
                self._metrics.count_transcript(event, self._metrics.clock() - self._arrived)
            yield event

    async def transcript(self) -> Transcript:
        """Return the transcript; raises as ``events``."""
        async for event in self.events():
            if isinstance(event, Transcript):
                return event
        raise failure(Cancelled())


def _response(transcript: Transcript, format: str) -> Response:
    content = FORMATS[format](transcript)
    if format.endswith("json"):
        return Response(content, media_type="application/json")
    text = content if content.endswith("\n") else f"{content}\n"
    media_type = "text/vtt" if format == "vtt" else "text/plain"
    return PlainTextResponse(text, media_type=media_type)


async def _streamed(events: AsyncIterator[Segment | Transcript]) -> AsyncIterator[str]:
    """Yield server-sent events: the text of every segment, then the whole text."""
    is_first = True
    try:
        async for event in events:
            if isinstance(event, Transcript):
                yield _event("transcript.text.done", text=as_text(event))
            elif delta := event.text.lstrip() if is_first else event.text:
                is_first = False
                yield _event("transcript.text.delta", delta=delta)
    except ErrorResponse as error:
        yield f"data: {error.json()}\n\n"
    yield "data: [DONE]\n\n"


def _event(kind: str, **fields: str) -> str:
    return f"data: {json_text({'type': kind, **fields})}\n\n"
