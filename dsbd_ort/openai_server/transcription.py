"""Requests with audio: OpenAI's multipart form, the lifecycle of a transcription, the response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, TypeVar

from fastapi import Request, Response, UploadFile
from fastapi.responses import PlainTextResponse
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from dsbd_errors import DsbdError
from dsbd_ort.audio.audio_files import SAMPLING_RATE, Samples, read_audio
from dsbd_ort.decoding import DecodingError
from dsbd_ort.engine import Cancelled, QueueFullError, Service
from dsbd_ort.openai_server.choices import check_limit
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
from dsbd_ort.requests.results import json_text
from dsbd_ort.speech.formats import FORMATS, WITH_TIMES, as_text
from dsbd_ort.speech.hot_words import MOST_WORDS
from dsbd_ort.speech.live_transcription import LiveTranscription, SpeechEvent
from dsbd_ort.speech.speech_request import WORD_TIMES, check_word_times
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.speech_entry import SpeechEntry

_OF_HTTP = {
    *("file", "model", "prompt", "response_format", "temperature", "timestamp_granularities"),
    *("include", "chunking_strategy", "user", "stream"),
}
"""Fields that are not keywords of ``Pipeline.transcribe``; all others are."""


def _list(name: str) -> AliasChoices:
    """Return both names of a field that may be repeated: OpenAI accepts both."""
    return AliasChoices(f"{name}[]", name)


class SpeechForm(BaseModel):
    """The fields of a request; the fields after ``stream`` are not OpenAI's."""

    model_config = ConfigDict(extra="forbid")
    file: UploadFile
    model: str
    language: str | None = Field(None, max_length=64)
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        None, validation_alias=_list("timestamp_granularities"), max_length=2
    )
    include: list[str] | None = Field(None, validation_alias=_list("include"), max_length=8)
    chunking_strategy: str | None = None
    user: str | None = None
    stream: bool | None = None
    num_beams: int | None = Field(None, ge=1)
    length_penalty: float | None = Field(None, allow_inf_nan=False)
    seed: int | None = None
    condition_on_previous_text: bool | None = None
    compression_ratio_threshold: float | None = Field(None, allow_inf_nan=False)
    logprob_threshold: float | None = Field(None, allow_inf_nan=False)
    no_speech_threshold: float | None = Field(None, allow_inf_nan=False)
    vad: bool | None = None
    best_of: int | None = Field(None, ge=1)
    num_return_sequences: int | None = Field(None, ge=1)
    hot_words: list[str] | None = Field(
        None, validation_alias=_list("hot_words"), max_length=MOST_WORDS
    )
    hot_word_gain: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)

    @property
    def format(self) -> str:
        return "txt" if self.response_format == "text" else self.response_format

    def check(self, settings: ServingSettings, speech: SpeechEntry | None) -> None:
        """Raise ErrorResponse for fields that this server or its model does not support.

        speech: the entry of a speech encoder-decoder; None for other models, which write no times.
        """
        if speech is None:
            self._check_without_times()
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise bad_request(
                "timestamp_granularities[] needs response_format verbose_json, but response_format "
                f"is {self.response_format}; set it, or leave timestamp_granularities[] out",
                "timestamp_granularities",
            )
        if speech is not None and WORD_TIMES in (self.timestamp_granularities or ()):
            try:
                check_word_times(speech)
            except InputError as error:
                raise bad_request(str(error), "timestamp_granularities", "unsupported") from error
        if self.include:
            raise bad_request(
                f"include[] has {self.include[0]!r}, which is not returned; leave it out: "
                "verbose_json has the mean log-probability of every segment",
                "include",
                "unsupported",
            )
        if self.chunking_strategy not in (None, "auto"):
            raise bad_request(
                "this value of chunking_strategy is not supported: the model reads windows of its "
                "own length; leave it out or use auto",
                "chunking_strategy",
                "unsupported",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise bad_request(
                f"stream is true, but response_format {self.response_format} cannot be streamed; "
                "use json or text, or leave stream out",
                "stream",
            )
        if (self.num_return_sequences or 1) > 1 and self.response_format != "verbose_json":
            raise bad_request(
                f"num_return_sequences is {self.num_return_sequences}, but response_format is "
                f"{self.response_format}: only verbose_json has several texts of a window, in its "
                "field dsbd; use it, or leave num_return_sequences out",
                "num_return_sequences",
            )
        check_limit("num_beams", self.num_beams or 1, settings.max_beams)
        check_limit("best_of", self.best_of or 1, settings.max_best_of)
        check_limit("num_return_sequences", self.num_return_sequences or 1, settings.max_best_of)

    def _check_without_times(self) -> None:
        given = {
            "timestamp_granularities": self.timestamp_granularities,
            "response_format": self.response_format in ("srt", "vtt") and self.response_format,
        }
        for name, value in given.items():
            if value:
                raise bad_request(
                    f"{name} is {value}, but this model writes no times; use response_format json, "
                    "text or verbose_json, without timestamp_granularities[]",
                    name,
                    "unsupported",
                )

    def options(self, task: str, defaults: Mapping[str, Any], *, has_times: bool) -> dict[str, Any]:
        """Return keywords for ``Pipeline.transcribe``; ``defaults``: the server's options."""
        given = {name: value for name, value in self if name not in _OF_HTTP and value is not None}
        options = {**defaults, **given, "task": task}
        if self.prompt:
            options["initial_prompt"] = self.prompt
        if self.temperature:  # 0 is OpenAI's default: higher temperatures only if a window fails
            options["temperature"] = (self.temperature,)
        elif self.temperature is None and "temperature" in defaults:
            options["temperature"] = (defaults["temperature"],)
        else:
            options.pop("temperature", None)
        if WORD_TIMES in (self.timestamp_granularities or ()):
            options["return_timestamps"] = WORD_TIMES
        elif has_times and self.format in WITH_TIMES:
            options["return_timestamps"] = True
        return options


T = TypeVar("T")


class TranscribedText(BaseModel):
    """The response in the format json."""

    text: str
    usage: dict[str, Any]


class TranscriptionHandler:
    """Responds to requests with audio; at most ``max_requests`` audios are decoded at a time.

    The other audios wait as the bytes that the clients sent.
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
        speech = None if encoder is None else encoder.speech
        form.check(self._settings, speech)
        with contextlib.ExitStack() as on_end:
            on_end.enter_context(self._gate.passed())
            self._enter()
            on_end.callback(self._leave)
            work = _Transcription(self._service, self._metrics, self._settings.request_timeout_s)
            on_end.callback(work.close)
            options = form.options(task, self._settings.defaults, has_times=speech is not None)
            begun = self._begun(work, form, options, on_end)
            await while_connected(request.receive, begun)
            if form.stream:
                return EventStream(_streamed(work.events()), on_end.pop_all().close)
            transcript = await while_connected(request.receive, work.transcript())
            return await asyncio.to_thread(_response, transcript, form.format)

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

    ``work`` receives a function that returns whether the request has ended (``on_end`` was closed);
    ``work`` should stop then. The place is released when both have ended.
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
    def __init__(self, service: Service, metrics: Metrics, timeout_s: float) -> None:
        """Call in the event loop that reads the events; ``timeout_s`` begins now."""
        self._service = service
        self._metrics = metrics
        self._arrived = metrics.clock()
        self.received: TimedEvents[SpeechEvent] = TimedEvents(timeout_s, "send a shorter audio")
        self._live: LiveTranscription | None = None
        self._is_over = False

    async def begin(self, samples: Samples, options: dict[str, Any]) -> None:
        """Submit the audio, in a thread, because checking its options takes time."""

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
        """Yield the segments, then the transcript; ErrorResponse: it failed, or it timed out."""
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
