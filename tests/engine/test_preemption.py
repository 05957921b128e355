"""A service whose cache is too small for its requests: some are preempted, and none can tell."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding import WithResult
from dsbd_ort.engine import Cancelled, Service, ServiceEvent, ServiceLimits
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.kv_cache import row_bytes
from tests.engine.test_service import told, until_ending

MAX_ROWS = 256
LONG: list[dict[str, Any]] = [
    {"strategy": "sample", "max_new_tokens": 200, "top_k": 20},
    {"strategy": "speculative", "max_new_tokens": 190, "draft_length": 4},
    {"strategy": "dsbd", "num_beams": 2, "draft_length": 3, "max_new_tokens": 80},
    {"strategy": "speculative", "coupling": "rejection", "max_new_tokens": 150, "draft_length": 3},
    {"strategy": "mjsd", "draft_beams": 2, "max_new_tokens": 70},
    {"strategy": "dsbd", "num_beams": 2, "replacement": True, "max_new_tokens": 70},
    {"strategy": "greedy", "max_new_tokens": 150},
    {"strategy": "sample", "stop_strings": ["no such text"], "max_new_tokens": 190},
]


@pytest.fixture(scope="module")
def alone(tiny_bundle: Bundle) -> list[Any]:
    with Pipeline.from_bundle(tiny_bundle.path, num_threads=1) as opened:
        return [told(opened.generate(**request)) for request in asked(8)]


@pytest.fixture
def service(pipeline: Pipeline) -> Iterator[Service]:
    """A service that expects short answers, after some of one token."""
    entries = pipeline.bundle.entry_by_role
    of_row = sum(row_bytes(entry.caches) for entry in entries.values())
    with Service(pipeline, ServiceLimits(kv_bytes=MAX_ROWS * of_row)) as opened:
        every_token = [*range(entries["target"].vocab_size)]
        for _ in range(24):
            opened.generate("x", strategy="sample", eos_token_id=every_token)
        assert opened.stats().max_rows == MAX_ROWS
        yield opened


def asked(count: int) -> list[dict[str, Any]]:
    return [  # the prompts are short, so that several begin
        {"prompt": "xyz"[: 1 + i % 3] * (1 + i), "eos_token_id": [], "seed": i, **LONG[i % 8]}
        for i in range(count)
    ]


def streamed(service: Service, request: dict[str, Any]) -> tuple[list[Any], str, list[int]]:
    """Return what the result told, and the text and tokens of the pieces together."""
    stream = WithResult(service.stream(**request))
    pieces = list(stream)
    tokens = [token for piece in pieces for token in piece.token_ids]
    return told(stream.result), "".join(piece.text for piece in pieces), tokens


def options_of(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "prompt"}


def test_streams_of_preempted_requests_are_those_of_lone_ones(
    service: Service, alone: list[Any]
) -> None:
    requests = asked(8)
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(lambda one: streamed(service, one), requests))
    assert service.stats().num_preemptions >= 2
    for (result, text, tokens), wanted in zip(found, alone, strict=True):
        assert result == wanted
        assert (tokens, text) == wanted[0][:2]


def test_a_preempted_request_can_be_cancelled_and_the_other_goes_on(
    service: Service, alone: list[Any]
) -> None:
    first, second = asked(2)
    endings: list[SimpleQueue[ServiceEvent]] = [SimpleQueue() for _ in range(2)]
    num_waiting: list[int] = []

    def cancel_the_second_once_preempted(event: ServiceEvent) -> None:
        if service.stats().num_preemptions:
            num_waiting.append(service.stats().num_waiting)
            live.cancel()
        endings[0].put(event)

    service.submit(first["prompt"], options_of(first), cancel_the_second_once_preempted)
    live = service.submit(second["prompt"], options_of(second), endings[1].put)
    assert isinstance(until_ending(endings[1]), Cancelled)
    result = until_ending(endings[0])
    assert isinstance(result, GenerationResult) and told(result) == alone[0]
    assert service.stats().num_preemptions == 1 and num_waiting[0] == 1
    assert told(service.generate(**first)) == alone[0]


@pytest.mark.parametrize("drain", [True, False])
def test_closing_finishes_or_cancels_preempted_requests(
    service: Service, alone: list[Any], drain: bool
) -> None:
    events: list[SimpleQueue[ServiceEvent]] = [SimpleQueue() for _ in range(2)]
    for request, queue in zip(asked(2), events, strict=True):
        service.submit(request["prompt"], options_of(request), queue.put)
    while not service.stats().num_preemptions:
        assert isinstance(events[0].get(timeout=60), StreamPiece)
    service.close(drain=drain)
    endings = [until_ending(queue) for queue in events]
    if drain:
        assert [told(ending) for ending in endings] == alone[:2]
    else:
        assert isinstance(endings[1], Cancelled)


def test_engines_that_fail_end_a_preempted_request_as_well(
    pipeline: Pipeline, service: Service
) -> None:
    session = pipeline.models.target._session  # the only way to a real engine that fails
    run = session.run

    def failing(inputs: Any) -> Any:
        if service.stats().num_preemptions and not service.stats().num_waiting:
            session.run = run
            raise CapacityError("no memory for the call")  # the first call of the resumed
        return run(inputs)

    session.run = failing
    with ThreadPoolExecutor(2) as callers:
        calls = [callers.submit(service.generate, **request) for request in asked(2)]
        failed = [call for call in calls if call.exception() is not None]
    assert [str(call.exception()) for call in failed] == ["no memory for the call"]
    assert service.generate("x", strategy="sample", max_new_tokens=3).sequences
