"""asyncio: requests of many tasks, and what cancelling a task or closing a stream does."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingError
from dsbd_ort.engine import (
    AsyncStream,
    QueueFullError,
    Service,
    ServiceClosedError,
    ServiceEvent,
    ServiceLimits,
    Submission,
)
from dsbd_ort.model_pair import BusyError
from dsbd_ort.requests.results import GenerationResult
from tests.engine.test_service import ENDLESS, requests, told


@pytest.fixture
def service(pipeline: Pipeline) -> Iterator[Service]:
    with Service(pipeline, ServiceLimits(max_requests=4, max_queued=40)) as opened:
        yield opened


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.005)


def is_idle(service: Service) -> bool:
    stats = service.stats()
    return stats.num_running == stats.num_waiting == 0


def test_tasks_get_what_threads_get(service: Service) -> None:
    asked = requests(14)

    async def together() -> list[GenerationResult]:
        return await asyncio.gather(
            *(service.agenerate(prompt, **options) for prompt, options in asked)
        )

    found = asyncio.run(together())
    for result, (prompt, options) in zip(found, asked, strict=True):
        assert told(result) == told(service.generate(prompt, **options))


def test_a_stream_brings_pieces_and_then_the_result(service: Service) -> None:
    async def stream(prompt: str, options: dict[str, Any]) -> None:
        pieces = service.astream(prompt, **options)
        assert pieces.result is None
        tokens, text = [], ""
        async for piece in pieces:
            tokens += piece.token_ids
            text += piece.text
        assert pieces.result is not None
        assert told(pieces.result)[0][:2] == (tokens, text)
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)

    async def together() -> None:
        await asyncio.gather(*(stream(prompt, options) for prompt, options in requests(7)))

    asyncio.run(together())


def test_cancelling_the_task_cancels_the_request(service: Service) -> None:
    async def cancel() -> None:
        tasks = [asyncio.create_task(service.agenerate("x", **ENDLESS)) for _ in range(6)]
        await until(lambda: service.stats().num_running == 4 and service.stats().num_waiting == 2)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await until(lambda: is_idle(service))

    asyncio.run(cancel())


def test_a_task_that_is_cancelled_while_it_submits_leaves_no_request(service: Service) -> None:
    may_go_on = threading.Event()
    submitted: list[Submission] = []

    def slow(on_event: Callable[[ServiceEvent], None]) -> Submission:
        may_go_on.wait(60)
        submitted.append(service.submit("x", ENDLESS, on_event))
        return submitted[0]

    async def cancel() -> None:
        task = asyncio.ensure_future(anext(AsyncStream(slow)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not submitted
        may_go_on.set()
        await until(lambda: bool(submitted) and submitted[0].is_cancelled)
        await until(lambda: is_idle(service))

    asyncio.run(cancel())


@pytest.mark.parametrize("way", ["aclose", "dropped", "timeout"])
def test_a_stream_that_is_not_read_to_its_end_cancels_the_request(
    service: Service, way: str
) -> None:
    async def give_up() -> None:
        stream = service.astream("x", **ENDLESS)
        await anext(stream)
        assert service.stats().num_running == 1
        if way == "aclose":
            await stream.aclose()
            await stream.aclose()  # again: it is closed already
        elif way == "dropped":
            del stream
            gc.collect()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    async for _ in stream:
                        pass
        await until(lambda: is_idle(service))

    asyncio.run(give_up())


def test_errors_are_those_of_submit(service: Service) -> None:
    async def fail() -> None:
        with pytest.raises(DecodingError, match="num_beams"):
            await service.agenerate("x", num_beams=0)
        with pytest.raises(DecodingError, match="no_such_field"):
            await anext(service.astream("x", no_such_field=1))
        tasks = [asyncio.create_task(service.agenerate("x", **ENDLESS)) for _ in range(44)]
        await until(lambda: service.stats().num_waiting == 40)
        with pytest.raises(QueueFullError):
            await service.agenerate("x")
        service.close(drain=False)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ServiceClosedError) for end in ends)
        with pytest.raises(ServiceClosedError):
            await service.agenerate("x")

    asyncio.run(fail())


def test_the_event_loop_may_end_before_the_request(service: Service) -> None:
    async def begin() -> None:
        await anext(service.astream("x", **ENDLESS))

    asyncio.run(begin())
    deadline = time.monotonic() + 60
    while not is_idle(service):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert service.generate("x", max_new_tokens=3).sequences


def test_a_callback_cannot_wait_for_its_own_thread(service: Service) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def on_event(_: object) -> None:
        try:
            asyncio.run(service.agenerate("x"))
        except BusyError as error:
            errors.append(error)
        done.set()

    service.submit("x", {"max_new_tokens": 1}, on_event)
    assert done.wait(60) and errors
