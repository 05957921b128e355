"""Callbacks that raise, wait or close, and the end of the engine's thread: no caller hangs."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingConfig, TraceIteration
from dsbd_ort.embedding.calls import answer
from dsbd_ort.engine import (
    Cancelled,
    EnginesEndedError,
    Service,
    ServiceClosedError,
    ServiceEvent,
    ServiceLimits,
)
from dsbd_ort.engine.errors import InternalError
from dsbd_ort.model_pair import BusyError
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_runtime.bundle_files.bundle import Bundle
from tests.engine.test_service import ENDLESS, SHORT, endless, until_ending

T = TypeVar("T")
SECONDS = 30


class OwnError(BaseException):
    """Not an Exception, and its text cannot be shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


RAISED = [KeyboardInterrupt, SystemExit, GeneratorExit, OwnError, ValueError, RecursionError]


@pytest.fixture
def pipeline(tiny_bundle: Bundle) -> Pipeline:
    """Left open: if a test fails, closing it could wait forever."""
    return Pipeline.from_bundle(tiny_bundle.path, num_threads=1)


def started(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a thread that does not keep the tests from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_time(work: Callable[[], T]) -> T:
    """Return what ``work`` returns; TimeoutError if it hangs."""
    return started(work).result(SECONDS)


def goes_on(service: Service) -> bool:
    return bool(in_time(lambda: service.generate("x", **SHORT)).sequences)


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("moment", ["step", "ending", "cancelled"])
def test_a_callback_that_raises_stops_no_other_request(
    pipeline: Pipeline, error: type[BaseException], moment: str
) -> None:
    service = Service(pipeline)
    other, events = endless(service)
    was_told = threading.Event()

    def raising(event: ServiceEvent) -> None:
        if moment != "ending" or not isinstance(event, StreamPiece):
            was_told.set()
            raise error

    live = service.submit("x", SHORT if moment != "cancelled" else {}, raising)
    if moment == "cancelled":
        live.cancel()
    assert was_told.wait(SECONDS)
    assert goes_on(service)
    other.cancel()
    assert isinstance(until_ending(events), Cancelled)
    in_time(service.close)


class RaisingTrace:
    """A trace recorder of a caller's."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def begin(self, prompt_ids: list[int], config: DecodingConfig) -> None:
        pass

    def record(self, iteration: TraceIteration) -> None:
        raise self._error


@pytest.mark.parametrize("error", RAISED)
def test_a_trace_recorder_that_raises_ends_its_own_request_alone(
    tiny_bundle: Bundle, error: type[BaseException]
) -> None:
    service = Service(Pipeline.from_bundle(tiny_bundle.path, num_threads=1, loop="python"))
    other, events = endless(service)
    trace = RaisingTrace(error)
    with pytest.raises(InternalError, match=error.__name__):
        in_time(lambda: service.generate("x", trace=trace, **SHORT))  # type: ignore[arg-type]
    assert goes_on(service)
    other.cancel()
    assert isinstance(until_ending(events), Cancelled)
    in_time(service.close)


class RaisingTokenizer:
    """Panics as the library does, by an error that is not an Exception, at more than one token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: Any) -> Any:
        if len(token_ids) > 1:
            raise OwnError
        return self._tokenizer.decode(token_ids)


def test_a_text_that_cannot_be_made_ends_its_own_request_alone(pipeline: Pipeline) -> None:
    service = Service(pipeline)
    tokenizer = pipeline.tokenizer
    pipeline.tokenizer = RaisingTokenizer(tokenizer)  # type: ignore[assignment]
    events: SimpleQueue[ServiceEvent] = SimpleQueue()
    service.submit("x", {**SHORT, "eos_token_id": []}, events.put)
    assert isinstance(until_ending(events), InternalError)
    pipeline.tokenizer = tokenizer
    assert goes_on(service)
    assert service.stats().num_running == 0
    in_time(service.close)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, OwnError])
def test_when_the_engines_end_every_request_ends_at_once(
    pipeline: Pipeline, error: type[BaseException]
) -> None:
    service = Service(pipeline, ServiceLimits(max_requests=2))
    session = pipeline.models.target._session  # the only way to an engine that does this
    run, is_over = session.run, threading.Event()

    def ending(inputs: Any) -> Any:
        if is_over.is_set():
            raise error
        return run(inputs)

    session.run = ending
    _, events = endless(service)
    callers = [started(lambda: service.generate("x", **ENDLESS)) for _ in range(4)]
    while service.stats().num_waiting < 3:  # two run, three wait
        time.sleep(0.001)
    is_over.set()
    for caller in callers:
        with pytest.raises(EnginesEndedError, match="the engines has ended"):
            caller.result(SECONDS)
    assert isinstance(until_ending(events), EnginesEndedError)
    with pytest.raises(EnginesEndedError, match=f"has ended: {error.__name__}.*open it again"):
        in_time(lambda: service.generate("x", **SHORT))
    assert not service.is_open and service.stats().num_running == 0
    in_time(service.close)


def test_when_the_engines_end_no_call_waits(pipeline: Pipeline) -> None:
    """Calls are made between two iterations: none is made after one that ends the thread."""
    service = Service(pipeline, ServiceLimits(max_requests=1))
    may_end, session = threading.Event(), pipeline.models.target._session

    def ending(inputs: Any) -> Any:
        may_end.wait(SECONDS)
        raise SystemExit

    run = session.run
    session.run = ending  # type: ignore[method-assign]
    try:
        generating = started(lambda: service.generate("x", **SHORT))
        while not service.stats().num_running:
            time.sleep(0.001)
        calling = started(lambda: service._loop.call(lambda target: target.num_rows))
        while not service._loop._calls:
            time.sleep(0.001)
        may_end.set()
        for caller in (calling, generating):
            with pytest.raises(EnginesEndedError, match="the engines has ended"):
                caller.result(SECONDS)
        with pytest.raises(EnginesEndedError, match="open it again"):
            in_time(lambda: service._loop.call(lambda target: target.num_rows))
        in_time(service.close)
    finally:
        session.run = run  # type: ignore[method-assign]


def test_a_callback_may_submit_cancel_and_close(pipeline: Pipeline) -> None:
    service = Service(pipeline, ServiceLimits(max_requests=1))
    live, _ = endless(service)
    second: SimpleQueue[ServiceEvent] = SimpleQueue()
    errors: SimpleQueue[BaseException] = SimpleQueue()

    def on_event(event: ServiceEvent) -> None:
        if isinstance(event, Cancelled):  # it waited, and was given up
            live.cancel()
            service.submit("x", SHORT, then_close)

    def then_close(event: ServiceEvent) -> None:
        second.put(event)
        if isinstance(event, StreamPiece):
            for wait in (service.generate, pipeline.generate):
                try:
                    wait("x", **SHORT)
                except BaseException as error:
                    errors.put(error)
            service.close()

    service.submit("y", {}, on_event).cancel()
    assert isinstance(until_ending(second), GenerationResult)
    assert isinstance(errors.get(timeout=SECONDS), BusyError)
    assert isinstance(errors.get(timeout=SECONDS), BusyError)
    with pytest.raises(ServiceClosedError):
        service.generate("x")
    in_time(service.close)


def test_a_callback_may_wait_for_a_thread_that_submits(pipeline: Pipeline) -> None:
    service = Service(pipeline, ServiceLimits(max_requests=1))
    live, _ = endless(service)
    found: SimpleQueue[object] = SimpleQueue()

    def on_event(event: ServiceEvent) -> None:  # told that it is cancelled, as it waited
        try:
            found.put(in_time(lambda: service.submit("x", {}, lambda _: None)))
        except BaseException as error:
            found.put(error)

    service.submit("y", {}, on_event).cancel()
    assert not isinstance(found.get(timeout=2 * SECONDS), BaseException)
    live.cancel()
    in_time(lambda: service.close(drain=False))


def test_streams_that_are_dropped_give_their_places_back(pipeline: Pipeline) -> None:
    service = Service(pipeline, ServiceLimits(max_requests=2))

    def drop() -> Iterator[StreamPiece]:
        stream = service.stream("x", **ENDLESS)
        next(stream)
        yield next(stream)

    for _ in range(6):
        steps = drop()
        in_time(lambda steps=steps: next(steps))  # type: ignore[misc]
        del steps
        gc.collect()
    assert goes_on(service)
    in_time(service.close)


class OneStep:
    """A service whose request yields one step, and then does not end."""

    is_cancelled = False

    def submit(self, prompt: str, options: Any, on_event: Callable[[Any], None]) -> OneStep:
        on_event(StreamPiece([1], "a", [0.0]))
        return self

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_caller_of_the_c_library_that_fails_gives_its_request_up() -> None:
    def failing(step: StreamPiece) -> bool:
        raise OwnError

    service = OneStep()
    with pytest.raises(OwnError):
        answer(service, "x", {}, failing)  # type: ignore[arg-type]
    assert service.is_cancelled
