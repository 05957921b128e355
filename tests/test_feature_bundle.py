"""A bundle with a feature draft: every strategy returns what it returns without drafts."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner

from dsbd_ort import GenerationResult, Pipeline, Regex, Service, ServiceLimits
from dsbd_ort.cli import inspect
from dsbd_ort.decoding.drafting.measured_costs import MEASURED_ROWS, measure_costs
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_pair
from tests.runtime.feature_pair import DRAFT, TARGET
from tests.runtime.tiny_graph import write_tiny_bundle

PAIRS = [  # (drafting, plain)
    ({"strategy": "dsbd", "num_beams": 2}, {"strategy": "beam-sample", "num_beams": 2}),
    (
        {"strategy": "dsbd", "num_beams": 3, "draft_length": 3, "draft_beams": 4},
        {"strategy": "beam-sample", "num_beams": 3},
    ),
    ({"strategy": "speculative", "draft_length": 4}, {"strategy": "sample"}),
    (
        {"strategy": "speculative-beam-search", "num_beams": 3, "draft_length": 2},
        {"strategy": "beam-search", "num_beams": 3},
    ),
    (
        {"strategy": "dsbd", "num_beams": 2, "constraint": Regex("[a-z ]{30}"), "draft_length": 3},
        {"strategy": "beam-sample", "num_beams": 2, "constraint": Regex("[a-z ]{30}")},
    ),
    (
        {"strategy": "dsbd", "num_beams": 2, "drafter": "model+ngram", "draft_length": 3},
        {"strategy": "beam-sample", "num_beams": 2},
    ),
]
PROMPTS = ["a", "ab ab ab", "def read(", "x" * 300, "def write(", "ab ab ab cd"]


@pytest.fixture(scope="module")
def feature_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("features") / "bundle"
    write_tiny_bundle(path, target=TARGET, draft=DRAFT)
    return open_bundle(path, verify=True)


def outcome(result: GenerationResult) -> list[tuple[list[int], float]]:
    return [(s.token_ids, round(s.logprob, 3)) for s in result.sequences]


def settled(options: dict[str, Any]) -> dict[str, Any]:
    warping = {} if "search" in options["strategy"] else {"temperature": 0.8, "top_k": 20}
    return {"max_new_tokens": 24, **warping, **options}


@pytest.mark.parametrize(("drafting", "plain"), PAIRS)
def test_alone_and_together(
    feature_bundle: Bundle, drafting: dict[str, Any], plain: dict[str, Any]
) -> None:
    with Pipeline.from_bundle(feature_bundle.path, num_threads=1) as pipe:
        expected = [outcome(pipe.generate(p, seed=i, **settled(plain))) for i, p in enumerate(PROMPTS)]  # fmt: skip # noqa: E501
        for _ in range(2):  # the second time prefixes are there already
            for i, prompt in enumerate(PROMPTS):
                result = pipe.generate(prompt, seed=i, **settled(drafting))
                assert outcome(result) == expected[i]
                if "draft_length" in drafting:  # else nothing is drafted where that does not pay
                    assert result.stats.num_draft_tokens > 0
        together = pipe.generate(PROMPTS, seed=0, **settled(plain))
        drafted = pipe.generate(PROMPTS, seed=0, **settled(drafting))
        assert [outcome(r) for r in drafted] == [outcome(r) for r in together]


def test_costs_of_a_feature_draft_can_be_measured(feature_bundle: Bundle) -> None:
    target, draft = load_pair(feature_bundle, settings=EngineSettings(num_threads=1))
    ticks = itertools.count()
    with target, draft:
        costs = measure_costs(target, draft, lambda: float(next(ticks)))
    assert costs.target.seconds == costs.draft.seconds == (1.0,) * len(MEASURED_ROWS)
    assert target.num_rows == draft.num_rows == 0


def test_a_service_answers_each_as_if_it_were_alone(feature_bundle: Bundle) -> None:
    """Several samples of one prompt, in too little memory for all: some are preempted."""
    options = settled({"strategy": "dsbd", "num_beams": 3, "draft_length": 3})
    with Pipeline.from_bundle(feature_bundle.path, num_threads=1) as pipe:
        wanted = [outcome(pipe.generate("def read(", seed=i, **options)) for i in range(6)]
        limits = ServiceLimits(max_requests=4, kv_bytes=700_000)
        with Service(pipe, limits) as service, ThreadPoolExecutor(6) as callers:
            asked = [
                callers.submit(service.generate, "def read(", seed=i, **options) for i in range(6)
            ]
            found = [outcome(answer.result()) for answer in asked]
    assert found == wanted


def test_inspect_says_what_is_returned_and_read(feature_bundle: Bundle) -> None:
    done = CliRunner().invoke(inspect, [str(feature_bundle.path)])
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if "layers 2, 0" in line]
    assert "features" in line and "returns what enters layers 2, 0" in line
    assert "reads 64, or 32 of its own" in line
    told = json.loads(CliRunner().invoke(inspect, [str(feature_bundle.path), "--json"]).stdout)
    assert told["target"]["features"] == {"width": 64, "layers": [2, 0], "own_width": None}
    assert told["draft"]["features"] == {"width": 64, "layers": None, "own_width": 32}
