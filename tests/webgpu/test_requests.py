"""Whole requests on WebGPU: the tokens of the CPU, whatever is asked for, preempted or shared."""

from functools import partial

import pytest

from dsbd_ort.decoding import STRATEGIES
from tests.exports import family_pair
from tests.robustness.demo_requests import check_demo_request, demo_requests
from tests.robustness.model_kinds import FAMILY_TEXTS, eagle3
from tests.robustness.test_whole_requests import check_many, opened
from tests.webgpu.conftest import HEADS

pytestmark = pytest.mark.webgpu


@pytest.fixture(scope="module", params=[HEADS[0], pytest.param(HEADS[1], marks=pytest.mark.slow)])
def pipes(request, bundle_by_head):
    with opened(bundle_by_head[request.param], provider="webgpu") as found:
        yield found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(pipes, strategy):
    """Preempted by force, on WebGPU; the draft and the policies that times decide are left out."""
    check_strategy(pipes, strategy)


def check_strategy(pipes, strategy):
    beams = {"num_beams": 2} if STRATEGIES[strategy].has_beams else {}
    options = {"strategy": strategy, "max_new_tokens": 8, "seed": 1, **beams}
    found = [
        pipe.generate("def read(path): return", **options) for pipe in (pipes.calm, pipes.forced)
    ]
    cpu, webgpu = ([sequence.token_ids for sequence in each.sequences] for each in found)
    assert webgpu == cpu


def check_requests(pipes, number):
    logits = pipes.calm.bundle.manifest.target.logits
    most_top_k = int(logits.removeprefix("topk:")) if logits.startswith("topk") else 0
    requests = demo_requests(most_top_k, FAMILY_TEXTS)
    check_many(requests, partial(check_demo_request, pipes), number, least=number / 3)


KINDS = {
    "EAGLE-3": eagle3,
    **{
        name: family_pair("llama", "gemma2", form="webgpu", **options)[1]
        for name, options in (
            ("exact", {"attention": "exact"}),
            ("int4", {"quantize": "int4", "max_kl": 10.0}),
            ("int8", {"quantize": "int8", "max_kl": 10.0}),
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_forms(kind, captures, tmp_path):
    """A feature draft, whose features cross by way of the host, and other weights."""
    options = {"form": "webgpu"} if kind == "EAGLE-3" else {}
    bundle = KINDS[kind](captures, tmp_path / "made", **options) / "bundle"
    with opened(bundle, provider="webgpu") as pipes:
        for strategy in ("dsbd", "speculative-beam-search"):
            check_strategy(pipes, strategy)


@pytest.mark.slow
def test_any_request(pipes):
    check_requests(pipes, 6)


@pytest.mark.long
def test_any_of_many_requests(pipes):
    check_requests(pipes, 100)
