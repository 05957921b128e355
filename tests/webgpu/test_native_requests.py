"""Whole requests to the native library on WebGPU: Python's tokens, several pipelines, refusals."""

import json
import os
import subprocess
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dsbd_ort import Pipeline
from dsbd_ort.decoding import STRATEGIES
from scripts.software_adapter import OWN
from tests.made_once import made_once
from tests.native.conftest import OWN_PROGRAMS, with_json
from tests.native.test_native_programs import FIXED
from tests.native.test_native_sources import NativeRequests, assert_same_answers, supported
from tests.robustness.demo_requests import demo_requests
from tests.robustness.model_kinds import FAMILY_TEXTS, eagle3
from tests.webgpu.conftest import HEADS

pytestmark = pytest.mark.webgpu

WEBGPU = json.dumps({"provider": "webgpu"})


@pytest.fixture(scope="module")
def bundle(bundle_by_head):
    return bundle_by_head["full"]


@pytest.fixture(scope="module", params=[HEADS[0], pytest.param(HEADS[1], marks=pytest.mark.slow)])
def both(request, native_build, bundle_by_head):
    """A pipeline of each library on WebGPU."""
    bundle = bundle_by_head[request.param]
    native = NativeRequests(native_build, bundle, WEBGPU)
    with Pipeline.from_bundle(bundle, provider="webgpu") as pipe:
        yield native, pipe
    native.close()


def with_preemptions(requests, rng):
    for request in requests:
        if rng.integers(2):
            request["preempts"] = (rng.random(40) < 0.3).tolist()
    return requests


def requests_of_all_strategies():
    rng = np.random.default_rng(1)
    options = {"max_new_tokens": 8, "seed": 1}
    found = []
    for name, strategy in STRATEGIES.items():
        beams = {"num_beams": 2} if strategy.has_beams else {}
        drafts = FIXED if strategy.has_draft else {}
        ids = rng.integers(3, 200, 12).tolist()
        found.append({"ids": ids, "options": {"strategy": name, **options, **beams, **drafts}})
    return with_preemptions(found, rng)


def test_every_strategy_alone_and_together(both):
    requests = requests_of_all_strategies()
    assert assert_same_answers(*both, requests) == len(requests)
    assert sum(assert_same_answers(*both, [each]) for each in requests[::3]) > 0


@pytest.mark.parametrize("number", [6, pytest.param(60, marks=pytest.mark.long)])
def test_any_requests_together(both, number):
    """Groups of requests drawn as tests/robustness does, some of them preempted."""
    logits = both[1].bundle.manifest.target.logits
    most_top_k = int(logits.removeprefix("topk:")) if logits.startswith("topk") else 0
    rng, accepted = np.random.default_rng(0), []
    drawn_requests = demo_requests(most_top_k, FAMILY_TEXTS)

    @seed(0)
    @settings(
        max_examples=number, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn=st.lists(drawn_requests, min_size=1, max_size=5))
    def holds(drawn):
        requests = with_preemptions([supported(each) for each in drawn], rng)
        accepted.append(assert_same_answers(*both, requests))

    holds()
    print(f"{sum(accepted)} requests equal Python's")
    assert sum(accepted) > number / 2


@pytest.mark.slow
@pytest.mark.parametrize("draft_provider", ["webgpu", "cpu"])
def test_a_feature_draft(native_build, captures, tmp_path_factory, draft_provider):
    """Its features are in memory of the host, wherever target and draft run."""
    make = partial(eagle3, captures, form="webgpu")
    bundle = made_once(tmp_path_factory, "eagle3-webgpu", make) / "bundle"
    placed = json.dumps({"provider": "webgpu", "draft_provider": draft_provider})
    native = NativeRequests(native_build, bundle, placed)
    requests = requests_of_all_strategies()
    with Pipeline.from_bundle(bundle, provider="webgpu") as pipe:
        assert assert_same_answers(native, pipe, requests) == len(requests)
    native.close()


IDS = [5, 6, 7, 8]
OF_TWO = [
    {"strategy": "dsbd", "num_beams": 2, "draft_length": 2, "max_new_tokens": 30, "seed": number}
    for number in range(2)
]


def test_two_pipelines_and_closing_while_a_request_runs(native_build, with_native, bundle):
    program = with_native(OWN_PROGRAMS / "pipelines.cpp", *with_json(native_build))
    options = [json.dumps({**each, **FIXED}) for each in OF_TWO]
    done = subprocess.run(
        [program, bundle, WEBGPU, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with Pipeline.from_bundle(bundle, provider="webgpu") as pipe:
        one, two = (pipe.generate(IDS, **each, **FIXED).sequences[0].token_ids for each in OF_TWO)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [one, two, one, two]


def refusal(native_build, bundle, *arguments, environment=()):
    """Return the message of the command, in one line."""
    command = [native_build / "dsbd_native", bundle, "--ids", "5", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=dict(environment) or None
    )
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("dsbd_native: ")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("dsbd_native: ")


def without(name):
    return {key: value for key, value in os.environ.items() if key != name}


@pytest.mark.skipif(os.environ.get("DSBD_WEBGPU") == OWN, reason="of Vulkan's drivers alone")
def test_no_adapter(native_build, bundle):
    environment = {**os.environ, "VK_DRIVER_FILES": os.devnull}
    error = refusal(native_build, bundle, "--provider", "webgpu", environment=environment)
    assert error.startswith("provider 'webgpu' finds no adapter"), error
    assert error.endswith("or use provider 'cpu'")


@pytest.mark.skipif(os.environ.get("DSBD_WEBGPU") == OWN, reason="a machine with a GPU offers that")
def test_no_device_is_offered_unless_software_is_allowed(native_build, bundle):
    environment = without("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER")
    error = refusal(native_build, bundle, "--provider", "webgpu", environment=environment)
    assert error.startswith("provider 'webgpu' finds no GPU; install the GPU's driver"), error


def test_a_library_that_is_no_provider(native_build, bundle, tmp_path):
    (tmp_path / "libonnxruntime_providers_webgpu.so").write_text("no library")
    environment = {**os.environ, "DSBD_PROVIDER_LIBRARY": str(tmp_path)}
    error = refusal(native_build, bundle, "--provider", "webgpu", environment=environment)
    assert "needs the library" in error and "which cannot be loaded" in error


def test_a_device_that_is_missing(native_build, bundle):
    error = refusal(native_build, bundle, "--provider", "webgpu:7")
    assert error == "there is no device webgpu:7, this machine has 1; choose webgpu:0"
