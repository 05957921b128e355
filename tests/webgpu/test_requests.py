"""Whole requests on WebGPU: the tokens of the CPU, whatever is asked for, preempted or shared."""

from functools import partial

import pytest

from tests.robustness.demo_requests import check_demo_request, demo_requests
from tests.robustness.model_kinds import FAMILY_TEXTS
from tests.robustness.test_whole_requests import check_many, opened
from tests.webgpu.conftest import HEADS

pytestmark = pytest.mark.webgpu


@pytest.fixture(scope="module", params=HEADS)
def pipes(request, bundle_by_head):
    with opened(bundle_by_head[request.param], provider="webgpu") as found:
        yield found


def check_requests(pipes, number):
    logits = pipes.calm.bundle.manifest.target.logits
    most_top_k = int(logits.removeprefix("topk:")) if logits.startswith("topk") else 0
    requests = demo_requests(most_top_k, FAMILY_TEXTS)
    check_many(requests, partial(check_demo_request, pipes), number, least=number / 3)


def test_any_request(pipes):
    check_requests(pipes, 8)


@pytest.mark.slow
def test_any_of_many_requests(pipes):
    check_requests(pipes, 100)
