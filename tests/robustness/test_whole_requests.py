"""Every option with every other: whole requests at random, over tables and all kinds of models."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from dsbd_export.config import DraftConfig
from dsbd_export.demo import demo_pair
from dsbd_export.draft_export import export_draft
from dsbd_export.parts.head import append_topk_head
from dsbd_ort import Pipeline
from dsbd_ort.decoding import STRATEGIES
from dsbd_runtime.bundle_files.bundle import MODEL_FILE, ROLES, open_bundle, write_manifest
from scripts.shared_captures import SharedCaptures
from tests.robustness.demo_requests import (
    DemoRequest,
    Pipes,
    check_demo_request,
    demo_requests,
)
from tests.robustness.model_kinds import MODEL_KINDS, ModelKind
from tests.robustness.preempting import TALLY, PreemptedPipeline
from tests.robustness.speech_requests import (
    SpeechRequest,
    check_speech_request,
    speech_requests,
)
from tests.robustness.whole_request_checks import check_whole_request
from tests.robustness.whole_requests import HEADS, WholeRequest, whole_requests

THOROUGH = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


NUM_TOP = 8


@contextlib.contextmanager
def opened(bundle: Path) -> Iterator[Pipes]:
    """Open a bundle for plain requests and for preempted ones; some must have been preempted."""
    num_before = TALLY.num_preempted
    with (
        Pipeline.from_bundle(bundle, num_threads=1) as calm,
        PreemptedPipeline.from_bundle(bundle, num_threads=1) as forced,
    ):
        yield Pipes(calm, forced)
    assert TALLY.num_preempted > num_before


@pytest.fixture(scope="module")
def demo_pipes(demo_bundle: Path) -> Iterator[Pipes]:
    with opened(demo_bundle) as pipes:
        yield pipes


@pytest.fixture(scope="module", params=HEADS)
def int8_pipes(
    request: pytest.FixtureRequest,
    int8_bundle: Path,
    captures: SharedCaptures,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pipes]:
    """The demo pair in int8-dynamic, whose bits are claimed, with another head put on.

    "proposed": also with a draft that proposes some of the tokens.
    """
    head = request.param
    bundle = Path(shutil.copytree(int8_bundle, tmp_path_factory.mktemp(head) / "bundle"))
    if head != "full":
        manifest = open_bundle(bundle).manifest
        for role in ROLES:
            file = bundle / role / MODEL_FILE
            append_topk_head(file, NUM_TOP)
        entries = {
            role: replace(getattr(manifest, role), logits=f"topk:{NUM_TOP}") for role in ROLES
        }
        write_manifest(bundle, versions=manifest.versions, **entries)
    if head == "proposed":
        draft = str(demo_pair()[1])
        config = DraftConfig(bundle=bundle, draft=draft, quantize="int8-dynamic", draft_vocab=600)
        export_draft(config, report=lambda _: None, source_of=captures)
    with opened(bundle) as pipes:
        assert pipes.is_bit_exact
        yield pipes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_request_on_tables(strategy: str) -> None:
    accepted: list[bool] = []

    @settings(THOROUGH, max_examples=100)
    @given(request=whole_requests(strategy))
    def holds(request: WholeRequest) -> None:
        note(repr(request))
        accepted.append(check_whole_request(request))

    holds()
    assert sum(accepted) >= 20, "most drawn requests are refused: draw others"


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_of_many_requests_on_tables(strategy: str, part: int) -> None:
    @settings(THOROUGH, max_examples=1000)
    @given(request=whole_requests(strategy))
    def holds(request: WholeRequest) -> None:
        note(repr(request))
        check_whole_request(request)

    holds()


@pytest.mark.slow
def test_any_request_on_the_demo_engines(demo_pipes: Pipes) -> None:
    accepted: list[bool] = []

    @settings(THOROUGH, max_examples=200)
    @given(request=demo_requests())
    def holds(request: DemoRequest) -> None:
        note(repr(request))
        accepted.append(check_demo_request(demo_pipes, request))

    holds()
    assert sum(accepted) >= 100, "most drawn requests are refused: draw others"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, id=name, marks=[pytest.mark.long] * kind.is_long)
        for name, kind in MODEL_KINDS.items()
    ],
)
def kind_and_pipes(
    request: pytest.FixtureRequest,
    captures: SharedCaptures,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ModelKind, Pipes]]:
    kind: ModelKind = request.param
    with opened(kind.bundle(tmp_path_factory, captures)) as pipes:
        yield kind, pipes


def check_requests_of_a_kind(kind: ModelKind, pipes: Pipes, number: int) -> None:
    accepted: list[bool] = []

    @settings(THOROUGH, max_examples=number)
    @given(request=demo_requests(texts=kind.texts))
    def holds(request: DemoRequest) -> None:
        note(repr(request))
        accepted.append(check_demo_request(pipes, request))

    holds()
    assert sum(accepted) >= number / 3, "most drawn requests are refused: draw others"


def test_any_request_of_every_kind_of_model(kind_and_pipes: tuple[ModelKind, Pipes]) -> None:
    check_requests_of_a_kind(*kind_and_pipes, 15)


@pytest.mark.long
def test_any_of_many_requests_of_every_kind(kind_and_pipes: tuple[ModelKind, Pipes]) -> None:
    check_requests_of_a_kind(*kind_and_pipes, 500)


@pytest.fixture(scope="module")
def speech_pipes(whisper: Path) -> Iterator[Pipes]:
    with opened(whisper / "bundle") as pipes:
        yield pipes


def check_transcriptions(pipes: Pipes, number: int) -> None:
    accepted: list[bool] = []

    @settings(THOROUGH, max_examples=number)
    @given(request=speech_requests())
    def holds(request: SpeechRequest) -> None:
        note(repr(request))
        accepted.append(check_speech_request(pipes, request))

    holds()
    assert sum(accepted) >= number / 2, "most drawn requests are refused: draw others"


def test_any_transcription(speech_pipes: Pipes) -> None:
    check_transcriptions(speech_pipes, 6)


@pytest.mark.long
def test_any_of_many_transcriptions(speech_pipes: Pipes) -> None:
    check_transcriptions(speech_pipes, 500)


def check_requests_in_int8(pipes: Pipes, number: int) -> None:
    accepted: list[bool] = []
    most_top_k = NUM_TOP if pipes.calm.bundle.manifest.target.logits.startswith("topk") else 0

    @settings(THOROUGH, max_examples=number)
    @given(request=demo_requests(most_top_k))
    def holds(request: DemoRequest) -> None:
        note(repr(request))
        accepted.append(check_demo_request(pipes, request))

    holds()
    assert sum(accepted) >= number / 2, "most drawn requests are refused: draw others"


@pytest.mark.slow
def test_any_request_in_int8_has_the_same_bits(int8_pipes: Pipes) -> None:
    check_requests_in_int8(int8_pipes, 15)


@pytest.mark.long
def test_any_of_many_requests_in_int8_has_the_same_bits(int8_pipes: Pipes) -> None:
    check_requests_in_int8(int8_pipes, 300)


def test_memory_does_not_grow_with_the_requests() -> None:
    """No memory is held after requests that ended, failed or were given up."""
    drawn: list[WholeRequest] = []

    @settings(THOROUGH, max_examples=60)
    @given(request=st.sampled_from([*STRATEGIES]).flatmap(whole_requests))
    def collect(request: WholeRequest) -> None:
        drawn.append(request)

    collect()
    held = []
    tracemalloc.start()
    try:
        for lap in range(4):
            for request in drawn:
                options = {**request.options, "seed": lap, "length_penalty": 1.0 + lap}
                check_whole_request(dataclasses.replace(request, options=options, tables=[]))
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # what leaks grows in every lap, numpy's caches of small buffers grow now and then
    grown = [after - before for before, after in itertools.pairwise(held[1:])]
    assert min(grown) < 6_000, held
