"""Every option beside every other: whole requests at random, over tables and the demo engines."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from dsbd_ort import Pipeline
from dsbd_ort.decoding import STRATEGIES
from tests.robustness.demo_requests import DemoRequest, check_demo_request, demo_requests
from tests.robustness.whole_request_checks import check_whole_request
from tests.robustness.whole_requests import WholeRequest, whole_requests

THOROUGH = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def demo_pipe(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pytest.MonkeyPatch.context() as patched:  # the measured costs of the engines go there
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipe:
            yield pipe


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_request_on_tables(strategy: str) -> None:
    accepted: list[bool] = []

    @settings(THOROUGH, max_examples=200)
    @given(request=whole_requests(strategy))
    def holds(request: WholeRequest) -> None:
        note(repr(request))
        accepted.append(check_whole_request(request))

    holds()
    assert sum(accepted) >= 100, "most drawn requests are refused: draw others"


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
def test_any_request_on_the_demo_engines(demo_pipe: Pipeline) -> None:
    accepted: list[bool] = []

    @settings(THOROUGH, max_examples=200)
    @given(request=demo_requests())
    def holds(request: DemoRequest) -> None:
        note(repr(request))
        accepted.append(check_demo_request(demo_pipe, request))

    holds()
    assert sum(accepted) >= 100, "most drawn requests are refused: draw others"


def test_memory_does_not_grow_with_the_requests() -> None:
    """Whatever was asked, failed or was given up, nothing of it is held afterwards."""
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
    assert held[3] - held[1] < 20_000, held
