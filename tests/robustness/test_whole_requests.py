"""Every option with every other: whole requests at random, over tables and all kinds of models."""

import contextlib
import gc
import tracemalloc
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from dsbd_export.config import DraftConfig
from dsbd_export.demo import demo_pair
from dsbd_export.draft_export import export_draft
from dsbd_ort import Pipeline
from dsbd_ort.decoding import STRATEGIES
from tests.robustness.demo_requests import (
    Pipes,
    check_demo_request,
    demo_requests,
)
from tests.robustness.model_kinds import MODEL_KINDS
from tests.robustness.preempting import TALLY, PreemptedPipeline
from tests.robustness.speech_requests import (
    check_speech_request,
    speech_requests,
)
from tests.robustness.whole_request_checks import check_whole_request
from tests.robustness.whole_requests import HEADS, WholeRequest, whole_requests
from tests.runtime.bundle_edits import with_topk_head

THOROUGH = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


NUM_TOP = 8


@contextlib.contextmanager
def opened(bundle, provider="cpu"):
    """Open a bundle for plain requests on the CPU, and on a provider for preempted ones.

    Some must have been preempted.
    """
    num_before = TALLY.num_preempted
    threads = {"num_threads": 1} if provider == "cpu" else {}
    with (
        Pipeline.from_bundle(bundle, num_threads=1) as calm,
        PreemptedPipeline.from_bundle(bundle, provider=provider, **threads) as forced,
    ):
        yield Pipes(calm, forced)
    assert TALLY.num_preempted > num_before


@pytest.fixture(scope="module")
def demo_pipes(demo_bundle):
    with opened(demo_bundle) as pipes:
        yield pipes


@pytest.fixture(scope="module", params=HEADS)
def int8_pipes(request, int8_bundle, captures, tmp_path_factory):
    """The demo pair in int8-dynamic, whose bits are claimed, with another head put on.

    "proposed": also with a draft that proposes some of the tokens.
    """
    head = request.param
    bundle = int8_bundle
    if head != "full":
        bundle = with_topk_head(bundle, tmp_path_factory.mktemp(head) / "bundle", NUM_TOP)
    if head == "proposed":
        draft = str(demo_pair()[1])
        config = DraftConfig(bundle=bundle, draft=draft, quantize="int8-dynamic", draft_vocab=600)
        export_draft(config, report=lambda _: None, source_of=captures)
    with opened(bundle) as pipes:
        assert pipes.is_bit_exact
        yield pipes


def check_many(requests, check, number, least=0):
    """Draw so many requests and check each; ``check`` returns whether one was accepted."""
    accepted = []

    @settings(THOROUGH, max_examples=number)
    @given(request=requests)
    def holds(request):
        note(repr(request))
        accepted.append(bool(check(request)))

    holds()
    assert sum(accepted) >= least, "most drawn requests are refused: draw others"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_request_on_tables(strategy):
    check_many(whole_requests(strategy), check_whole_request, 100, least=20)


def test_a_preempted_feature_draft_that_shared_more_rows_than_its_target():
    """The target computes its prompt anew for the log-probabilities of the prompt."""
    request = WholeRequest(
        options={
            "strategy": "speculative-beam-search",
            "max_new_tokens": 1,
            "seed": 0,
            "num_beams": 1,
            "prompt_logprobs": True,
            "draft_length": 0,
        },
        vocab_size=17,
        table="smooth",
        draft="features",
        table_seed=219,
        prompt=(0, 0, 0),
        stop=(),
        seconds_a_row=0.0,
        head="full",
        num_top=12,
        check="repeated",
    )
    assert check_whole_request(request)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_of_many_requests_on_tables(strategy, part):
    check_many(whole_requests(strategy), check_whole_request, 1000)


@pytest.mark.slow
def test_any_request_on_the_demo_engines(demo_pipes):
    check_many(demo_requests(), partial(check_demo_request, demo_pipes), 200, least=100)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, id=name, marks=[pytest.mark.long] * kind.is_long)
        for name, kind in MODEL_KINDS.items()
    ],
)
def kind_and_pipes(request, captures, tmp_path_factory):
    kind = request.param
    with opened(kind.bundle(tmp_path_factory, captures)) as pipes:
        yield kind, pipes


def check_requests_of_a_kind(kind, pipes, number):
    requests = demo_requests(texts=kind.texts)
    check_many(requests, partial(check_demo_request, pipes), number, least=number / 3 - 3)


def test_any_request_of_every_kind_of_model(kind_and_pipes):
    check_requests_of_a_kind(*kind_and_pipes, 15)


@pytest.mark.long
def test_any_of_many_requests_of_every_kind(kind_and_pipes):
    check_requests_of_a_kind(*kind_and_pipes, 500)


@pytest.fixture(scope="module")
def speech_pipes(whisper):
    with opened(whisper / "bundle") as pipes:
        yield pipes


def check_transcriptions(pipes, number):
    check_many(speech_requests(), partial(check_speech_request, pipes), number, least=number / 2)


def test_any_transcription(speech_pipes):
    check_transcriptions(speech_pipes, 6)


@pytest.mark.long
def test_any_of_many_transcriptions(speech_pipes):
    check_transcriptions(speech_pipes, 500)


def check_requests_in_int8(pipes, number):
    most_top_k = NUM_TOP if pipes.calm.bundle.manifest.target.logits.startswith("topk") else 0
    requests = demo_requests(most_top_k)
    check_many(requests, partial(check_demo_request, pipes), number, least=number / 2)


@pytest.mark.slow
def test_any_request_in_int8_has_the_same_bits(int8_pipes):
    check_requests_in_int8(int8_pipes, 15)


@pytest.mark.long
def test_any_of_many_requests_in_int8_has_the_same_bits(int8_pipes):
    check_requests_in_int8(int8_pipes, 300)


def test_memory_does_not_grow_with_the_requests():
    """No memory is held after requests that ended, failed or were given up."""
    drawn = []
    requests = st.sampled_from([*STRATEGIES]).flatmap(whole_requests)
    check_many(requests, drawn.append, 60)
    held = []
    tracemalloc.start()
    try:
        for lap in range(9):
            for request in drawn:
                options = {**request.options, "seed": lap, "length_penalty": 1.0 + lap}
                check_whole_request(replace(request, options=options, tables=[]))
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
            # what leaks grows in every lap, numpy's caches and other threads now and then
            if lap > 1 and held[-1] - held[-2] < 6_000:
                return
    finally:
        tracemalloc.stop()
    raise AssertionError(f"each lap left more: {held}")
