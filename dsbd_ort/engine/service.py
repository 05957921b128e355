"""A service: many callers, one pipeline, one thread that runs its engines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from dsbd_ort.decoding import TraceRecorder
from dsbd_ort.decoding.decode import check_decodable
from dsbd_ort.decoding.request import most_rows
from dsbd_ort.engine.admission import Admission
from dsbd_ort.engine.engine_loop import EngineLoop
from dsbd_ort.engine.errors import ServiceClosedError
from dsbd_ort.engine.events import Cancelled, ServiceEvent
from dsbd_ort.engine.limits import ServiceLimits, cache_rows
from dsbd_ort.engine.live_request import LiveRequest
from dsbd_ort.generated import GenerationResult, StreamStep
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.request_lock import BusyError
from dsbd_ort.text_stream import TextStream
from dsbd_runtime.chat_template import Message


@dataclass(frozen=True, kw_only=True)
class ServiceStats:
    """What a service does just now.

    Attributes:
        num_running, num_waiting: requests.
        rows_in_use: rows in the target's cache.
        rows_reserved: rows that the running requests may need.
        max_rows: rows that the cache may hold.
        kv_bytes: of the caches of both engines.
    """

    num_running: int
    num_waiting: int
    rows_in_use: int
    rows_reserved: int
    max_rows: int
    kv_bytes: int


class Service:
    """Answers requests of any threads; those that are live share the engine calls.

    Each request gets what ``Pipeline.generate`` would return. The pipeline belongs to the service
    until that is closed; its own requests would wait until then.

    Attributes:
        pipeline: for its bundle, tokenizer and chat template.
        limits: what the service may use.
    """

    def __init__(self, pipeline: Pipeline, limits: ServiceLimits | None = None) -> None:
        """Take an opened pipeline and start.

        Raises:
            InputError: the limits leave no room for the smallest cache.
            DsbdError: the engines cannot be used.
        """
        self.pipeline = pipeline
        self.limits = limits or ServiceLimits()
        self._admission = Admission(self.limits, cache_rows(self.limits, pipeline.bundle))
        self._engines = EngineLoop(pipeline, self._admission)
        self._engines.start()

    def submit(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        on_event: Callable[[ServiceEvent], None],
        *,
        trace: TraceRecorder | None = None,
    ) -> LiveRequest:
        """Take a request; return at once.

        Args:
            prompt: text, or token ids.
            options: fields of DecodingConfig.
            on_event: gets every step and then one ending, in the thread that runs the engines: it
                must return at once, and must not raise. It may submit, cancel and close (which
                then does not wait), but not generate or stream.
            trace: is told what every iteration did to this request, in the same thread.

        Raises:
            DecodingError, InputError, CapacityError: the request cannot be answered.
            QueueFullError: too many wait.
            ServiceClosedError: the service takes no request any more.
            EnginesEndedError: nor does one whose engines' thread has ended by a failure.
        """
        request = self.pipeline.prepare(prompt, options, trace=trace)
        check_decodable(request, *self._engines.models)
        live = LiveRequest(
            request=request,
            texts=TextStream(self.pipeline.tokenizer, request.config.stop_texts),
            num_rows=most_rows(len(request.prompt_ids), request.config),
            on_event=on_event,
            wake=self._engines.wake,
        )
        self._engines.enqueue(live)
        return live

    def generate(
        self, prompt: str | Sequence[int], *, trace: TraceRecorder | None = None, **options: Any
    ) -> GenerationResult:
        """Continue a prompt and wait for it; see Pipeline.generate and ``submit``."""
        steps = self.stream(prompt, trace=trace, **options)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: GenerationResult = stop.value
                return result

    def stream(
        self, prompt: str | Sequence[int], *, trace: TraceRecorder | None = None, **options: Any
    ) -> Generator[StreamStep, None, GenerationResult]:
        """Continue a prompt step by step; see Pipeline.stream and ``submit``.

        Steps that nobody takes yet are kept. Closing the stream gives the request up.

        Raises:
            BusyError: an ``on_event`` calls it, which the engines wait for.
        """
        if self._engines.is_own_thread:
            raise BusyError(
                "generate and stream wait for the engines, which wait for this on_event to return; "
                "use submit, or call them in another thread"
            )
        events: SimpleQueue[ServiceEvent] = SimpleQueue()
        live = self.submit(prompt, options, events.put, trace=trace)
        try:
            while True:
                event = events.get()
                if isinstance(event, StreamStep):
                    yield event
                elif isinstance(event, GenerationResult):
                    return event
                elif isinstance(event, Cancelled):
                    raise ServiceClosedError("the service was closed before the request was over")
                else:
                    raise event
        finally:
            live.cancel()

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation; see Pipeline.chat_prompt."""
        return self.pipeline.chat_prompt(messages)

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: neither closed nor ended by a failure of its own."""
        return self._engines.is_open

    def stats(self) -> ServiceStats:
        """Return what goes on; numbers may be a moment old."""
        admission, (target, draft) = self._admission, self._engines.models
        return ServiceStats(
            num_running=len(admission.live),
            num_waiting=len(admission.waiting),
            rows_in_use=target.num_rows,
            rows_reserved=admission.rows_reserved,
            max_rows=admission.max_rows,
            kv_bytes=target.kv_bytes + draft.kv_bytes,
        )

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests; end those there are, or give them up; let go of the pipeline.

        Calling it again does nothing, or gives up what is left.
        """
        self._engines.close(drain=drain)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)
