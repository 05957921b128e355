"""Lifecycle of a generation request: submission, results, timeout, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive

from dsbd_errors import DsbdError
from dsbd_ort.engine import AsyncEvents, Service, ServiceEvent, Submission
from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.errors import (
    ErrorResponse,
    bad_request,
    client_disconnected,
    failure,
    rejection,
    shutting_down,
    unknown_model,
)
from dsbd_ort.openai_server.metrics import Metrics, RequestMeter
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_ort.openai_server.protocol import (
    GenerationBody,
    ResponseHead,
    StreamOptions,
)
from dsbd_ort.openai_server.responses import Builder, EventStream, full_response, streamed_events
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_ort.version import __version__
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME
from dsbd_runtime.text.tokenizer import Tokenizer

Body = TypeVar("Body", CompletionBody, ChatBody)
T = TypeVar("T")
Event = TypeVar("Event")
_GRAMMAR_THREADS = 2
_MEDIA_THREADS = 4


class Gate:
    """Counts generation requests in flight; rejects new ones once draining. For one event loop."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_draining = False

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Count a request while the block runs; raise ErrorResponse if the server drains."""
        if self.is_draining:
            raise shutting_down()
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    def drain(self) -> None:
        self.is_draining = True


class GenerationHandler:
    """Responds to generation requests with a service, within the limits of a server."""

    def __init__(
        self, service: Service, settings: ServingSettings, metrics: Metrics, gate: Gate
    ) -> None:
        self._service = service
        self._settings = settings
        self._metrics = metrics
        self._gate = gate
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammars")
        self._media_threads = ThreadPoolExecutor(_MEDIA_THREADS, "media")
        manifest = service.pipeline.bundle.path / MANIFEST_NAME
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        self._fingerprint = f"dsbd-ort-{__version__}-{digest[:12]}"

    async def respond(
        self,
        request: Request,
        body: Body,
        plan_of: Callable[[Body], GenerationPlan],
        builder_of: Callable[[ResponseHead, GenerationPlan], Builder],
        id_prefix: str,
        named: Callable[[ErrorResponse], ErrorResponse] | None = None,
    ) -> Response:
        """Return the response in one piece or as a stream; raise ErrorResponse if it fails.

        named: returns an error with the names of the client's fields; None: ``body.own_error``.
        """
        named = named or body.own_error
        try:
            return await self._responded(request, body, plan_of, builder_of, id_prefix, named)
        except ErrorResponse as error:
            raise named(error) from error

    async def _responded(
        self,
        request: Request,
        body: Body,
        plan_of: Callable[[Body], GenerationPlan],
        builder_of: Callable[[ResponseHead, GenerationPlan], Builder],
        id_prefix: str,
        named: Callable[[ErrorResponse], ErrorResponse],
    ) -> Response:
        self._check(body)
        wants_logprobs = body.num_top_logprobs is not None
        tokenizer = self._tokenizer(body) if wants_logprobs else None
        with contextlib.ExitStack() as on_end:
            on_end.enter_context(self._gate.passed())
            meter = RequestMeter(self._metrics)
            timeout_s = self._settings.request_timeout_s
            generation = Generation(self._service, meter, timeout_s, _caller(request))
            on_end.callback(generation.close)
            # In a thread: tokenizing would delay other clients. A grammar may take one second, a
            # picture at a URL ten. They have their own threads, so that they delay only each other.
            threads = request.state.threads
            threads = self._grammar_threads if body.may_take_long else threads
            threads = self._media_threads if body.has_media else threads
            plan = await asyncio.get_running_loop().run_in_executor(
                threads, _submitted, generation, plan_of, body
            )
            builder = builder_of(self._head(id_prefix), plan)
            results = generation.results()
            if body.stream:
                options = body.stream_options or StreamOptions()
                events = streamed_events(results, plan, builder, tokenizer, options, named)
                return EventStream(events, on_end.pop_all().close)
            work = full_response(results, plan, builder, tokenizer)
            content = await while_connected(request.receive, work)
            return Response(content, media_type="application/json")

    def _tokenizer(self, body: GenerationBody) -> Tokenizer:
        tokenizer = self._service.pipeline.tokenizer
        skips = (body.model_extra or {}).get("skip_special_tokens") is not False
        return tokenizer if skips else tokenizer.with_special_tokens

    def _head(self, id_prefix: str) -> ResponseHead:
        return ResponseHead(
            id=f"{id_prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            system_fingerprint=self._fingerprint,
        )

    def _check(self, body: GenerationBody) -> None:
        if body.model != self._settings.model_name:
            raise unknown_model(body.model, self._settings.model_name)
        if body.stream_options is not None and not body.stream:
            message = "stream_options needs stream true; set it, or leave stream_options out"
            raise bad_request(message, "stream_options")


def _submitted(
    generation: Generation, plan_of: Callable[[Body], GenerationPlan], body: Body
) -> GenerationPlan:
    plan = plan_of(body)
    generation.submit(plan)
    return plan


def _caller(request: Request) -> str:
    key = request.headers.get("authorization", "")
    return hashlib.sha256(key.encode("latin-1")).hexdigest() if key else ""


class TimedEvents(AsyncEvents[Event]):
    """Events of the engines for one HTTP request, with a time limit."""

    def __init__(self, timeout_s: float, fix: str) -> None:
        """``timeout_s``: from now on; ``fix``: advice at the end of the timeout's error message."""
        super().__init__()
        self._timeout_s = timeout_s
        self._fix = fix
        self._deadline = asyncio.get_running_loop().time() + timeout_s

    async def get(self) -> Event:
        async with self.in_time():
            return await super().get()

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Raise an ErrorResponse if the block does not end before the request's deadline."""
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError as error:
            limit = f"the {self._timeout_s:g} s that this server allows"
            raise ErrorResponse(
                504, f"no answer within {limit}; {self._fix}", code="timeout"
            ) from error


class Generation:
    """The engine requests of one HTTP request, submitted and cancelled together.

    The engine never waits for a client: events are queued, at most one for each new token.
    """

    def __init__(
        self, service: Service, meter: RequestMeter, timeout_s: float, caller: str = ""
    ) -> None:
        """Call in the event loop that reads the results; ``timeout_s`` begins now."""
        self._service = service
        self._caller = caller
        self._meter = meter
        self._events: TimedEvents[tuple[int, ServiceEvent]] = TimedEvents(
            timeout_s, "request fewer tokens"
        )
        self._submissions: list[Submission] = []
        self._constraints: list[Any] = []
        self._num_ended = 0
        self._is_closed = False

    def submit(self, plan: GenerationPlan) -> None:
        """Submit all engine requests of a plan, or none; may be called in any thread.

        ErrorResponse: an engine request is rejected, the plan has too many of them, or ``close``
        was called meanwhile.
        """
        limits = self._service.limits
        capacity = limits.max_requests + limits.max_queued
        if len(plan.configs) > capacity:
            raise bad_request(
                f"prompts and n make {len(plan.configs)} engine requests, this server allows "
                f"{capacity} at a time; send fewer prompts, or a smaller n",
                "prompt",
                "limit_exceeded",
            )
        self._constraints = [config.constraint for config in plan.configs]
        try:
            for index, config in enumerate(plan.configs):
                submission = self._service.submit(
                    plan.prompts[plan.prompt_index(index)],
                    config,
                    partial(self._put, index),
                    caller=self._caller,
                )
                self._submissions.append(submission)
                if self._is_closed:  # ``close`` may have run before this request was added
                    submission.cancel()
                    raise client_disconnected()
        except DsbdError as error:
            self.close()
            raise rejection(error) from error

    def close(self) -> None:
        """Cancel the engine requests that have not ended, and those that ``submit`` adds later."""
        self._is_closed = True  # first: ``submit`` reads it after it has added a request
        if self._num_ended < len(self._submissions):
            self._meter.cancelled()
        for submission in self._submissions:
            submission.cancel()
        self._num_ended = len(self._submissions)

    async def results(self) -> AsyncIterator[tuple[int, StreamPiece | GenerationResult]]:
        """Yield pieces and results, each with the index of its engine request, until all ended.

        ErrorResponse: an engine request failed or was cancelled, or the HTTP request timed out.
        """
        while self._num_ended < len(self._submissions):
            index, event = await self._events.get()
            if isinstance(event, StreamPiece):
                self._meter.piece(index, event)
            elif isinstance(event, GenerationResult):
                self._num_ended += 1
                self._meter.result(event, self._constraints[index])
            else:
                self._num_ended += 1
                raise failure(event)
            yield index, event

    def _put(self, index: int, event: ServiceEvent) -> None:
        self._events.put((index, event))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; if the client disconnects, cancel it, raise ErrorResponse."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_disconnected()
    finally:
        working.cancel()
        disconnecting.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
