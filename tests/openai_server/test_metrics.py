"""/metrics: vLLM's names, and numbers that are those of the requests."""

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsbd_ort import GenerationResult, StreamPiece
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.metrics import Metrics, RequestMeter
from tests.openai_server.fakes import ScriptedService
from tests.openai_server.running_server import MODEL

VLLM = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)


def samples(text):
    """Return the values by name and by those labels that are not the model's name."""
    return {
        (sample.name, *(v for name, v in sorted(sample.labels.items()) if name != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def fresh(serve):
    with serve(limits=ServiceLimits(max_requests=2)) as running:
        yield running


def test_what_was_answered_is_counted(fresh):
    assert not samples(httpx2.get(f"{fresh.url}/metrics").text)["vllm:prompt_tokens_total",]
    body = {
        "model": MODEL,
        "prompt": "def f(",
        "max_tokens": 9,
        "seed": 1,
        "num_return_sequences": 2,
        "draft_policy": "fixed",
        "draft_length": 2,
    }
    answer = httpx2.post(f"{fresh.url}/v1/completions", json=body).json()
    httpx2.post(f"{fresh.url}/v1/completions", json={**body, "n": 99})
    httpx2.get(f"{fresh.url}/no/such/path")
    (stats,) = answer["dsbd"]["requests"]
    found = samples(httpx2.get(f"{fresh.url}/metrics").text)
    assert {name for (name, *_) in found} >= set(VLLM)
    wanted = {
        ("vllm:num_requests_running",): 0,
        ("vllm:num_requests_waiting",): 0,
        ("vllm:prompt_tokens_total",): answer["usage"]["prompt_tokens"],
        ("vllm:generation_tokens_total",): 18,
        ("vllm:request_success_total", "length"): 2,
        ("vllm:time_to_first_token_seconds_count",): 1,
        ("vllm:e2e_request_latency_seconds_count",): 1,
        ("vllm:spec_decode_num_drafts_total",): stats["num_iterations"],
        ("vllm:spec_decode_num_draft_tokens_total",): stats["num_draft_tokens"],
        ("dsbd:drafted_tokens_total", "model"): stats["num_draft_tokens"],
        ("dsbd:accepted_tokens_total", "model"): stats["num_accepted_tokens"],
        ("vllm:spec_decode_num_accepted_tokens_total",): stats["num_accepted_tokens"],
        ("dsbd:http_answers_total", "/v1/completions", "200"): 1,
        ("dsbd:http_answers_total", "/v1/completions", "400"): 1,
        ("dsbd:http_answers_total", "other", "404"): 1,
        ("dsbd:requests_cancelled_total",): 0,
    }
    assert {key: found[key] for key in wanted} == wanted


def test_times_are_those_of_the_clock(pipeline):
    times = iter([100.0, 100.5, 100.75, 102.0])
    metrics = Metrics(ScriptedService(pipeline, lambda: iter(())), MODEL, lambda: next(times))
    meter = RequestMeter(metrics)
    meter.piece(0, StreamPiece([], "", []))  # nothing is certain yet: no token, no time
    meter.piece(0, StreamPiece([1], "a", [-1.0]))
    meter.piece(0, StreamPiece([2], "b", [-1.0]))
    result = pipeline.generate("a", max_new_tokens=2)
    meter.result(GenerationResult(result.sequences, result.stats, result.seed))
    registry = metrics.registry
    for name, wanted in (
        ("vllm:time_to_first_token_seconds_sum", 0.5),
        ("vllm:inter_token_latency_seconds_sum", 0.25),
        ("vllm:e2e_request_latency_seconds_sum", 2.0),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("dsbd:kv_bytes", 4096),
    ):
        assert registry.get_sample_value(name, {"model_name": MODEL}) == wanted


def test_constrained_requests_are_counted_by_kind(serve):
    def posted(http, **fields):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 5, "seed": 1, **fields}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200

    with serve() as running, httpx2.Client(base_url=running.url, timeout=30) as http:
        posted(http)
        before = samples(http.get("/metrics").text)
        assert not any(name[0].startswith("dsbd:constrained") for name in before)
        posted(http, guided_regex="[ab]{3}")
        posted(http, structured_outputs={"regex": "[ab]{2}"}, n=2)
        posted(http, response_format={"type": "json_object"})
        after = samples(http.get("/metrics").text)
    assert after["dsbd:constrained_tokens_total", "regex"] == 3 + 2 * 2
    assert after["dsbd:constrained_tokens_total", "json_object"] == 5
    assert 0 < after["dsbd:constrained_iterations_total", "regex"] <= 7
