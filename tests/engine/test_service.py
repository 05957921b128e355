"""A service on a real bundle: every caller gets what the pipeline alone would return."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.decoding import WithResult
from dsbd_ort.engine import (
    Cancelled,
    Service,
    ServiceClosedError,
    ServiceEvent,
    ServiceLimits,
    ServiceStats,
    Submission,
)
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError

OPTIONS: list[dict[str, Any]] = [
    {"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed", "draft_length": 2},
    {"strategy": "dsbd", "num_beams": 2},
    {"strategy": "beam-sample", "num_beams": 2, "top_k": 10},
    {"strategy": "speculative", "top_p": 0.9},
    {"strategy": "speculative-beam-search", "num_beams": 2},
    {"strategy": "dsbd", "num_beams": 2, "draft_policy": "throughput"},
    {"strategy": "sample", "stop_strings": ["e", "q"], "temperature": 0.7},
]
PROMPTS = ["def read(path):", "import ", "class Reader:\n    def __init__(self", "x", "def read(p"]


ENDLESS: dict[str, Any] = {"strategy": "sample", "max_new_tokens": 400, "eos_token_id": []}
SHORT: dict[str, Any] = {"max_new_tokens": 5}


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            PROMPTS[i % len(PROMPTS)],
            {**OPTIONS[i % len(OPTIONS)], "seed": i, "max_new_tokens": 12 + i % 7},
        )
        for i in range(count)
    ]


def told(result: GenerationResult) -> list[tuple[list[int], str, str]]:
    return [(s.token_ids, s.text, s.finish_reason) for s in result.sequences]


def until_ending(events: SimpleQueue[ServiceEvent]) -> ServiceEvent:
    while isinstance(event := events.get(timeout=60), StreamPiece):
        pass
    return event


def endless(service: Service) -> tuple[Submission, SimpleQueue[ServiceEvent]]:
    """A request that runs for as long as the context allows, and whose first step has come."""
    events: SimpleQueue[ServiceEvent] = SimpleQueue()
    live = service.submit("x", ENDLESS, events.put)
    assert isinstance(events.get(timeout=60), StreamPiece)
    return live, events


@pytest.mark.parametrize("max_requests", [1, 8])
def test_eight_callers_get_what_each_would_get_alone(pipeline: Pipeline, max_requests: int) -> None:
    asked = requests(56)
    alone = [told(pipeline.generate(prompt, **options)) for prompt, options in asked]
    with (
        Service(pipeline, ServiceLimits(max_requests=max_requests)) as service,
        ThreadPoolExecutor(8) as callers,
    ):
        found = list(callers.map(lambda one: told(service.generate(one[0], **one[1])), asked))
    assert found == alone
    assert told(pipeline.generate(asked[0][0], **asked[0][1])) == alone[0]  # it is free again


def test_a_stream_brings_the_tokens_the_text_and_the_logprobs(pipeline: Pipeline) -> None:
    with Service(pipeline) as service:
        for prompt, options in requests(14):
            stream = WithResult(service.stream(prompt, **options))
            steps = list(stream)
            best = stream.result.sequences[0]
            assert [token for step in steps for token in step.token_ids] == best.token_ids
            assert [p for step in steps for p in step.token_logprobs] == best.token_logprobs
            assert "".join(step.text for step in steps) == best.text


def test_cancelled_requests_end_and_the_others_go_on(pipeline: Pipeline) -> None:
    with Service(pipeline, ServiceLimits(max_requests=2)) as service:
        gone, its_events = endless(service)
        other, others_events = endless(service)
        waiting: SimpleQueue[ServiceEvent] = SimpleQueue()
        third = service.submit("y", {"max_new_tokens": 4}, waiting.put)
        assert (service.stats().num_running, service.stats().num_waiting) == (2, 1)
        assert third.num_prompt_tokens == 1
        gone.cancel()
        gone.cancel()
        assert isinstance(until_ending(its_events), Cancelled)
        assert isinstance(until_ending(waiting), GenerationResult)  # in the place of the first
        fourth = service.submit("y", {"max_new_tokens": 4}, waiting.put)
        assert isinstance(until_ending(waiting), GenerationResult)
        fourth.cancel()  # too late: nothing more is told
        other.cancel()
        assert isinstance(until_ending(others_events), Cancelled)
        assert waiting.empty() and its_events.empty() and others_events.empty()


def test_closing_a_stream_gives_the_request_up(pipeline: Pipeline) -> None:
    with Service(pipeline, ServiceLimits(max_requests=1)) as service:
        stream = service.stream("x", **ENDLESS)
        next(stream)
        stream.close()
        steps = service.stream("x", **ENDLESS)
        next(steps)  # there is one place: the first has left it long before its end
        assert service.stats().num_running == 1
        steps.close()


def test_requests_that_cannot_be_answered_are_refused_at_once(pipeline: Pipeline) -> None:
    with Service(pipeline) as service:
        wrong = [
            ("x", {"num_beams": 0}, "num_beams"),
            ("x", {"no_such_field": 1}, "no_such_field"),
            ([], {}, "no token"),
            ([10**6], {}, "token id"),
            ("x", {"max_new_tokens": 10**6}, "max_new_tokens"),
            (["x"], {}, "str among its token ids"),
        ]
        for prompt, options, message in wrong:
            with pytest.raises(DsbdError, match=message):
                service.submit(prompt, options, lambda _: None)
        assert service.stats().num_running == service.stats().num_waiting == 0


def test_memory_is_bounded(pipeline: Pipeline) -> None:
    limits = ServiceLimits(max_requests=8, kv_bytes=2_000_000)
    order: SimpleQueue[int] = SimpleQueue()
    seen: list[ServiceStats] = []
    with Service(pipeline, limits) as service:
        max_rows = service.stats().max_rows
        small = {"strategy": "sample", "max_new_tokens": 60, "eos_token_id": []}
        large = {"strategy": "beam-sample", "num_beams": max_rows // 150, "max_new_tokens": 60}
        with pytest.raises(CapacityError, match=r"may need \d+ cache rows .* fewer beams"):
            service.generate("x", **{**large, "num_beams": max_rows // 20})

        def submit(number: int, options: dict[str, Any]) -> None:
            def on_event(event: ServiceEvent) -> None:
                seen.append(service.stats())
                if not isinstance(event, StreamPiece):
                    order.put(number)

            service.submit("x", options, on_event)

        for number, options in enumerate([small] * 4 + [large, small, large, small]):
            submit(number, options)
        assert sorted(order.get(timeout=60) for _ in range(8)) == list(range(8))
    assert max(stats.num_running for stats in seen) > 1
    assert max(stats.kv_bytes for stats in seen) <= 2_000_000
    assert max(stats.rows_in_use for stats in seen) <= max_rows
    assert max(stats.rows_reserved for stats in seen) <= max_rows


@pytest.mark.parametrize("drain", [True, False])
def test_closing_ends_what_runs_or_gives_it_up(pipeline: Pipeline, drain: bool) -> None:
    service = Service(pipeline, ServiceLimits(max_requests=1))
    events: SimpleQueue[ServiceEvent] = SimpleQueue()
    for _ in range(2):  # one runs, one waits
        service.submit("x", {**ENDLESS, "max_new_tokens": 100}, events.put)
    assert isinstance(events.get(timeout=60), StreamPiece)
    service.close(drain=drain)
    kind = GenerationResult if drain else Cancelled
    assert isinstance(until_ending(events), kind)
    assert isinstance(until_ending(events), kind)
    with pytest.raises(ServiceClosedError):
        service.generate("x")
    service.close()
    assert pipeline.generate("x", max_new_tokens=2).sequences


def test_a_service_whose_engines_fail_says_so_and_goes_on(pipeline: Pipeline) -> None:
    session = pipeline.models.target._session  # the only way to a real engine that fails
    run, fails = session.run, iter([False, True])

    def failing(inputs: Any) -> Any:
        if next(fails, False):
            raise CapacityError("no memory for the call")
        return run(inputs)

    with Service(pipeline) as service:
        session.run = failing
        with pytest.raises(CapacityError, match="no memory for the call"):
            service.generate("x", max_new_tokens=20, eos_token_id=[])
        assert service.generate("x", max_new_tokens=3).sequences


def test_limits_that_make_no_sense_are_refused(pipeline: Pipeline) -> None:
    for limits in ({"max_requests": 0}, {"max_queued": -1}, {"kv_bytes": 0}):
        with pytest.raises(InputError, match=next(iter(limits))):
            ServiceLimits(**limits)
    with pytest.raises(InputError, match="smallest caches"):
        Service(pipeline, ServiceLimits(kv_bytes=1000))


def test_a_closed_pipeline_is_an_error_of_the_constructor(tiny_bundle: Bundle) -> None:
    pipeline = Pipeline.from_bundle(tiny_bundle.path)
    pipeline.close()
    others = threading.enumerate()  # services of other tests may be open
    with pytest.raises(DsbdError, match="closed"):
        Service(pipeline)
    started = set(threading.enumerate()) - set(others)
    assert not any(thread.name == "dsbd-engines" for thread in started)


def test_a_service_that_is_dropped_gives_the_engines_back(tiny_bundle: Bundle) -> None:
    pipeline = Pipeline.from_bundle(tiny_bundle.path, num_threads=1)  # not closed if this fails

    def is_free() -> bool:
        generate = partial(pipeline.generate, "x", max_new_tokens=2)
        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        thread.join(20)
        return not thread.is_alive()

    options = {**ENDLESS, "max_new_tokens": 12}
    events: SimpleQueue[ServiceEvent] = SimpleQueue()
    Service(pipeline)  # idle
    assert is_free()
    Service(pipeline).submit("x", options, events.put)  # its request ends first
    assert is_free() and isinstance(until_ending(events), GenerationResult)

    def submit_and_drop(service: Service) -> None:
        service.submit("x", options, lambda event: events.put((service, event)[1]))

    submit_and_drop(Service(pipeline))  # the thread of the engines drops the last reference
    assert is_free() and isinstance(until_ending(events), GenerationResult)
    service: Any = Service(pipeline)
    service.itself = service  # a cycle
    del service
    gc.collect()
    assert is_free()
    pipeline.close()
