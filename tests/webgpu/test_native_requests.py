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
from tests.native.conftest import native_build, with_native  # noqa: F401 (fixtures)
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
def both(request, native_build, bundle_by_head):  # noqa: F811
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
def test_a_feature_draft(native_build, captures, tmp_path_factory, draft_provider):  # noqa: F811
    """Its features are in memory of the host, wherever target and draft run."""
    make = partial(eagle3, captures, form="webgpu")
    bundle = made_once(tmp_path_factory, "eagle3-webgpu", make) / "bundle"
    placed = json.dumps({"provider": "webgpu", "draft_provider": draft_provider})
    native = NativeRequests(native_build, bundle, placed)
    requests = requests_of_all_strategies()
    with Pipeline.from_bundle(bundle, provider="webgpu") as pipe:
        assert assert_same_answers(native, pipe, requests) == len(requests)
    native.close()
