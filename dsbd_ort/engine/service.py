"""Service: concurrent requests on one pipeline, from any thread or asyncio task."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from dsbd_ort.decoding import (
    DecodingConfig,
    DecodingOptions,
    DecodingRequest,
    TraceRecorder,
    result_of,
)
from dsbd_ort.decoding.row_bounds import most_new_tokens, most_rows
from dsbd_ort.engine.async_stream import AsyncStream, result_or_raise
from dsbd_ort.engine.engine_loop import EngineLoop
from dsbd_ort.engine.errors import ServiceClosedError
from dsbd_ort.engine.limits import ServiceLimits, cache_rows
from dsbd_ort.engine.scheduler import Scheduler, ServiceEvent, Submission
from dsbd_ort.model_pair import BusyError
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.requests.option_defaults import Options, given_options
from dsbd_ort.requests.prompts import Prompt
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_ort.wings import wing
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.text.chat_messages import Message

if TYPE_CHECKING:
    from dsbd_ort.audio.audio_files import Audio
    from dsbd_ort.speech.live_transcription import LiveTranscription, SpeechEvent
    from dsbd_ort.speech.speech_request import SpeechOptions
    from dsbd_ort.speech.transcript import Segment, Transcript

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class ServiceStats:
    """Current load of a service; rows are those of the target's cache.

    rows_reserved: rows that the running requests were expected to need when they were admitted.
    max_rows: rows that the cache may hold.
    kv_bytes: memory of the caches of all engines.
    num_preemptions: how often a running request has given up its rows so far.
    """

    num_running: int
    num_waiting: int
    rows_in_use: int
    rows_reserved: int
    max_rows: int
    kv_bytes: int
    num_preemptions: int


class Follower(Protocol):
    """Submits one request after another in a thread of its own, as a transcription does."""

    def cancel(self) -> None:
        """End it without a result; may be called again, and after its end."""

    def join(self) -> None:
        """Wait for its end; in its own thread return at once."""


class Service:
    """Runs the requests of any number of threads; concurrent ones share the engine calls.

    Each request gets the result of ``Pipeline.generate``. The service holds the engines of the
    pipeline until it is closed: until then ``Pipeline.generate`` itself waits. A service without
    references closes by itself once its requests have ended.

    Attributes:
        pipeline: provides the engines, the tokenizer and the chat template.
        limits: on requests and memory.
    """

    def __init__(self, pipeline: Pipeline, limits: ServiceLimits | None = None) -> None:
        """Start the engine thread on an open pipeline.

        Raises:
            InputError: the limits leave no room for the smallest cache.
            DsbdError: the pipeline is closed, or its engines fail.
        """
        self.pipeline = pipeline
        self.limits = limits or ServiceLimits()
        self._scheduler = Scheduler(self.limits, cache_rows(self.limits, pipeline.bundle))
        self._loop = EngineLoop(pipeline, self._scheduler)
        self._followers: set[Follower] = set()
        self._is_closing = False
        self._loop.start()
        # The thread refers to the engines, not to the service, so that an unused service is freed.
        weakref.finalize(self, self._loop.abandon).atexit = False

    def submit(
        self,
        prompt: Prompt,
        options: Options,
        on_event: Callable[[ServiceEvent], None],
        *,
        trace: TraceRecorder | None = None,
        caller: str = "",
    ) -> Submission:
        """Submit a request; return at once.

        Args:
            prompt: text, or token ids.
            options: fields of DecodingConfig as a mapping, or a DecodingConfig.
            on_event: called with every StreamPiece and then one ending, in the thread that runs the
                engines: it must return at once, and must not raise. It may submit, cancel and
                close (which then does not wait), but not generate or stream.
            trace: records every iteration of this request, in the same thread.
            caller: the n-gram drafter searches the texts of this caller only.

        Raises:
            DecodingError, InputError, CapacityError: the request is invalid, or too large.
            QueueFullError: too many requests wait.
            ServiceClosedError: the service is closed.
            EnginesEndedError: the thread that runs the engines has ended by a failure.
        """
        request = self.pipeline.prepare(prompt, options, trace=trace, caller=caller)
        return self.submit_request(request, on_event)

    def submit_request(
        self,
        request: DecodingRequest,
        on_event: Callable[[ServiceEvent], None],
        is_further: bool = False,
    ) -> Submission:
        """Submit a request that the pipeline has made; see ``submit``.

        is_further: whether its follower already has another request in the queue.
        """
        self.pipeline.models.check(request)
        submission = Submission(
            request=request,
            texts=self.pipeline.text_stream(request),
            most_rows=most_rows(
                len(request.prompt_ids), request.config, has_top_k_head=self._has_top_k_head
            ),
            on_event=on_event,
            wake=self._loop.wake,
            is_further=is_further,
        )
        self._loop.enqueue(submission)
        return submission

    def submit_audio(
        self,
        audio: Audio,
        options: Mapping[str, Any],
        on_event: Callable[[SpeechEvent], None],
    ) -> LiveTranscription:
        """Submit an audio to a speech model; return at once.

        Args:
            audio: see ``Pipeline.transcribe``; a file is read here.
            options: keyword arguments of ``Pipeline.transcribe``.
            on_event: called with every Segment and then one ending, in a thread of this audio. It
                need not return at once.

        Raises:
            InputError, DecodingError: the audio or an option is invalid, or the model reads text.
            ServiceClosedError: the service is closed.
        """
        if self._is_closing:
            raise ServiceClosedError("the service is closed or closing; use another one")
        live: LiveTranscription = wing("speech").submit_audio(self, audio, options, on_event)
        self._followers.add(live)
        live.start(self._followers.discard)
        return live

    def call(self, work: Callable[[CausalLM], _Result]) -> _Result:
        """Return the result of ``work(target)``; see EngineLoop.call."""
        return self._loop.call(work)

    def transcribe(
        self,
        audio: Audio,
        *,
        on_segment: Callable[[Segment], None] | None = None,
        **options: Unpack[SpeechOptions],
    ) -> Transcript:
        """Transcribe an audio and wait for the end; see Pipeline.transcribe and ``submit_audio``.

        ``on_segment`` is called in the caller's thread. An exception of it cancels the
        transcription.
        """
        self._check_may_wait()
        transcript: Transcript = wing("speech").transcribe_on(self, audio, on_segment, options)
        return transcript

    def generate(
        self,
        prompt: Prompt,
        *,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> GenerationResult:
        """Continue a prompt and wait for the result; see Pipeline.generate and ``submit``."""
        return result_of(self.stream(prompt, config=config, trace=trace, **options))

    def stream(
        self,
        prompt: Prompt,
        *,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Generator[StreamPiece, None, GenerationResult]:
        """Stream the continuation of a prompt; see Pipeline.stream and ``submit``.

        Pieces are queued until they are read. Closing the stream cancels the request.

        Raises:
            BusyError: it is called in an ``on_event``; the engines wait for that call to return.
        """
        self._check_may_wait()
        events: SimpleQueue[ServiceEvent] = SimpleQueue()
        live = self.submit(prompt, given_options(config, options), events.put, trace=trace)
        try:
            while isinstance(event := events.get(), StreamPiece):
                yield event
            return result_or_raise(event)
        finally:
            live.cancel()

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> GenerationResult:
        """Continue a prompt like ``generate``; cancelling the task cancels the request."""
        stream = self.astream(prompt, config=config, trace=trace, **options)
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
        assert stream.result is not None  # at the end of the pieces
        return stream.result

    def astream(
        self,
        prompt: Prompt,
        *,
        config: DecodingConfig | None = None,
        trace: TraceRecorder | None = None,
        **options: Unpack[DecodingOptions],
    ) -> AsyncStream:
        """Return the pieces of a request like ``stream``, for ``async for``; see AsyncStream."""
        self._check_may_wait()
        given = given_options(config, options)
        return AsyncStream(lambda on_event: self.submit(prompt, given, on_event, trace=trace))

    def _check_may_wait(self) -> None:
        if self._loop.is_own_thread:
            raise BusyError(
                "generate and stream wait for the engines, which wait for this on_event to return; "
                "use submit, or call them in another thread"
            )

    def most_new_tokens(self, num_prompt_tokens: int, config: DecodingConfig) -> int:
        """Return the most tokens that context and cache allow an answer; at least 1."""
        room = self.pipeline.bundle.context_length - num_prompt_tokens
        by_cache = most_new_tokens(
            num_prompt_tokens,
            config,
            self._scheduler.max_rows,
            has_top_k_head=self._has_top_k_head,
        )
        return max(min(room, by_cache), 1)

    @property
    def _has_top_k_head(self) -> bool:
        return self._loop.models[0].spec.head.num_top_logits > 0

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation; see Pipeline.chat_prompt."""
        return self.pipeline.chat_prompt(messages, chat_template_kwargs=chat_template_kwargs)

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted: neither closed nor ended by a failure."""
        return self._loop.is_open and not self._is_closing

    def stats(self) -> ServiceStats:
        """Return the current load; numbers may be a moment old."""
        scheduler, (target, draft) = self._scheduler, self._loop.models
        return ServiceStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            rows_in_use=target.num_rows,
            rows_reserved=scheduler.rows_reserved,
            max_rows=scheduler.max_rows,
            kv_bytes=target.kv_bytes + (draft.kv_bytes if draft else 0),
            num_preemptions=scheduler.num_preemptions,
        )

    def close(self, *, drain: bool = True) -> None:
        """Reject new requests, finish or cancel the others, and release the pipeline.

        A second call does nothing, but with ``drain`` False it cancels the requests that are left.
        """
        self._is_closing = True
        for live in list(self._followers):
            if drain:  # their next windows become further requests
                live.join()
            else:
                live.cancel()
        self._loop.close(drain=drain)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.close(drain=error is None)
