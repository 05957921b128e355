"""Failures that are not the client's: error responses without internals, and nothing left over."""

import asyncio
import json
import logging
import threading
import time

import httpx2
import pytest

from dsbd_ort import StreamPiece
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.errors import ErrorResponse
from dsbd_ort.openai_server.generation import Generation
from dsbd_ort.openai_server.metrics import Metrics, RequestMeter
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_runtime.errors import CapacityError, EngineError
from tests.openai_server.fakes import ScriptedService
from tests.openai_server.running_server import MODEL, running_server

BODY = {"model": MODEL, "prompt": "SECRET", "max_tokens": 8}
STEP = StreamPiece([65, 66], "AB", [-1.0, -2.0])
LONG = {  # lasts until its client has gone
    "model": MODEL,
    "prompt": "a",
    "max_tokens": 1500,
    "strategy": "beam-sample",
    "num_beams": 2,
    "eos_token_id": [],
    "stream": True,
}


def soon(is_true):
    """Return whether it becomes true within five seconds."""
    until = time.monotonic() + 5
    while not is_true() and time.monotonic() < until:
        time.sleep(0.01)
    return is_true()


def one_step():
    yield STEP


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("/srv/models/x.onnx broke"), 500, "engine_failed"),
        (CapacityError("no memory for this request"), 503, "no_memory"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(pipeline, caplog, error, status, code, stream):
    with running_server(ScriptedService(pipeline, lambda: iter([STEP, error]))) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json={**BODY, "stream": stream})
    if stream:
        assert answer.status_code == 200  # it had begun
        first, last, done = answer.text.strip().split("\n\n")
        assert '"text":"AB"' in first.replace('": "', '":"') and done == "data: [DONE]"
        found = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == status
        found = answer.json()["error"]
    assert (found["type"], found["code"]) == ("server_error", code)
    assert "/srv" not in answer.text
    assert str(error) in caplog.text


def test_health_and_ready_fail_once_the_engine_has_ended(serve):
    def ending(inputs):
        raise SystemExit

    with serve() as server, httpx2.Client(base_url=server.url) as http:
        assert http.get("/ready").json() == {"status": "ready"}
        assert http.get("/health").json() == {"status": "alive"}
        server.service.pipeline.models.target._session.run = (
            ending  # the only way to a thread that ends
        )
        assert http.post("/v1/completions", json=BODY).status_code == 500
        for path in ("/ready", "/health"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_ended")


def test_a_service_closed_by_its_owner_is_not_ready(pipeline):
    with running_server(ScriptedService(pipeline, one_step)) as server:
        server.service.close()
        for path in ("/ready", "/health"):
            assert httpx2.get(f"{server.url}{path}").status_code == 503


def test_a_full_queue_is_a_429_and_takes_none_of_them(pipeline):
    with running_server(ScriptedService(pipeline, one_step, num_taken=1)) as server:
        body = {**BODY, "prompt": ["a", "b"]}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 429
        assert answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        assert server.service.requests[0].is_cancelled.is_set()


def test_a_request_has_its_time(pipeline):
    with running_server(ScriptedService(pipeline, one_step), request_timeout_s=0.2) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert server.service.requests[0].is_cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_along(pipeline, stream):
    with running_server(ScriptedService(pipeline, one_step)) as server:
        with pytest.raises(httpx2.ReadTimeout):
            body = {**BODY, "stream": stream}
            httpx2.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
        assert soon(lambda: server.service.stats().num_running == 0)
        assert soon(lambda: server.gate.num_inside == 0)
        metrics = httpx2.get(f"{server.url}/metrics").text
        assert 'dsbd:requests_cancelled_total{model_name="tiny"} 1.0' in metrics


@pytest.mark.parametrize("num_before", [0, 1])
def test_what_is_submitted_while_it_closes_is_cancelled_too(pipeline, num_before):
    """An HTTP request that is cancelled leaves the thread that submits where it is."""
    submitting, has_closed = threading.Event(), threading.Event()

    class Held(ScriptedService):
        def submit(self, *arguments, **options):
            if len(self.requests) == num_before:
                submitting.set()
                assert has_closed.wait(5)
            return super().submit(*arguments, **options)

    async def closed_meanwhile():
        meter = RequestMeter(Metrics(service, MODEL, time.monotonic))
        generation = Generation(service, meter, timeout_s=5)
        config = pipeline.config({"strategy": "sample"})
        plan = GenerationPlan(
            prompts=[[65]], configs=[config] * 4, num_choices=4, num_copies=1, is_ranked=False
        )
        working = asyncio.create_task(asyncio.to_thread(generation.submit, plan))
        assert await asyncio.to_thread(submitting.wait, 5)
        generation.close()
        has_closed.set()
        with pytest.raises(ErrorResponse) as caught:
            await working
        assert caught.value.status == 499

    service = Held(pipeline, one_step)
    asyncio.run(closed_meanwhile())
    assert len(service.requests) == num_before + 1
    assert all(request.is_cancelled.is_set() for request in service.requests)


def test_an_unread_stream_is_dropped_and_the_engine_never_waits(pipeline):
    told = []

    def many():
        for number in range(300):
            told.append(number)
            yield StreamPiece([65], "x" * 65_536, [-1.0])

    with running_server(ScriptedService(pipeline, many), stuck_after_s=1) as server:
        body = {**BODY, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert soon(lambda: len(told) == 300)  # while the client reads nothing
            assert soon(lambda: server.service.requests[0].is_cancelled.is_set())


def test_a_bug_is_a_500_that_tells_nothing(pipeline, caplog):
    class Broken(ScriptedService):
        def submit(self, prompt, options, on_event, *, caller=""):
            raise KeyError(f"no {prompt}")

    with running_server(Broken(pipeline, one_step)) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "bug")
    assert "KeyError" in caplog.text and "in submit" in caplog.text
    assert "83" not in answer.text  # of S, the prompt's first token


def test_the_log_holds_nothing_of_prompts_or_answers(pipeline, caplog):
    caplog.set_level(logging.INFO)
    with running_server(
        ScriptedService(pipeline, lambda: iter([STEP, EngineError("it broke")]))
    ) as server:
        for body in (BODY, {**BODY, "stream": True}, {**BODY, "temperature": "SECRET"}):
            httpx2.post(f"{server.url}/v1/completions?key=SECRET", json=body)
        httpx2.get(f"{server.url}/a%0Ab")
    ours = [record for record in caplog.records if record.name.startswith("dsbd_ort")]
    lines = [record.getMessage() for record in ours]
    assert not any("SECRET" in line or "AB" in line for line in lines)
    assert [line.rpartition(" ")[0] for line in lines if "/" in line] == [
        "POST /v1/completions 500",
        "POST /v1/completions 200",
        "POST /v1/completions 400",
        "GET /a%0Ab 404",
    ]


def test_one_too_many_is_refused_until_the_other_has_gone(serve):
    limits = ServiceLimits(max_requests=1, max_queued=0)
    with serve(limits=limits) as server, httpx2.Client(base_url=server.url) as http:
        with http.stream("POST", "/v1/completions", json=LONG):
            assert soon(lambda: server.service.stats().num_running == 1)
            refused = http.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert soon(lambda: server.service.stats().num_running == 0)
        short = {**LONG, "max_tokens": 1, "stream": False}
        assert http.post("/v1/completions", json=short).status_code == 200


def test_memory_is_bounded(serve):
    with serve(limits=ServiceLimits(kv_bytes=200_000)) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json=LONG)
        assert answer.status_code == 400
        assert "cache rows" in answer.json()["error"]["message"]
        assert server.service.stats().kv_bytes <= 200_000
