"""Target and draft of a pipeline: measured costs, acceptance estimators, kept cache rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_ort import Pipeline, Service
from dsbd_ort.decoding import TableModel
from dsbd_ort.decoding.cost_curve import CostCurve, EngineCosts
from dsbd_ort.model_pair import MOST_ESTIMATORS, engine_costs
from dsbd_runtime.bundle import Bundle, open_bundle
from dsbd_runtime.loading import load_pair

PROMPT = "def read_json(path):"


class CountedModel(TableModel):
    def __init__(self) -> None:
        super().__init__(2, lambda path: np.zeros(2))
        self.num_calls = 0

    def forward(self, token_ids, positions, mask, logit_rows):
        self.num_calls += 1
        return super().forward(token_ids, positions, mask, logit_rows)


@pytest.fixture
def costs_of(demo_bundle: Path, tmp_path: Path):
    """Ask for the costs of the demo bundle; return them and whether they were measured."""
    bundle = open_bundle(demo_bundle)

    def ask(num_threads: int | None = None, cache: Path = tmp_path):
        models = CountedModel(), CountedModel()
        costs = engine_costs(
            bundle,
            *models,
            provider="cpu",
            num_threads=num_threads,
            environment={"XDG_CACHE_HOME": str(cache)},
        )
        return costs, models[0].num_calls > 0

    return ask


def test_costs_are_measured_once_and_read_afterwards(costs_of):
    measured, was_measured = costs_of()
    again, was_measured_again = costs_of()
    assert was_measured and not was_measured_again
    assert again == measured


def test_other_threads_have_costs_of_their_own(costs_of):
    costs_of()
    assert costs_of(num_threads=1)[1]


DAMAGED = [
    "",
    "{}",
    '{"target": {"rows": [1], "seconds": [1.0]}}',
    '{"target": {"rows": [1, 2], "seconds": [1.0, NaN]}}',
    '{"target": {"rows": [1, 2], "seconds": [1.0, 1e400]}}',
    '{"target": {"rows": [1, 1e400], "seconds": [1.0, 2.0]}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_named_and_measured_again(costs_of, damage, tmp_path, caplog):
    costs_of()
    (file,) = (tmp_path / "dsbd-ort").glob("costs-*.json")
    file.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert costs_of()[1]
    assert f"{file} cannot be used" in caplog.text
    assert not costs_of()[1]


def test_a_cache_that_cannot_be_written_is_named(costs_of, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert costs_of(cache=blocked)[1]
    assert "cannot be written" in caplog.text


def test_throughput_gives_the_tokens_of_beam_sampling(demo_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    common = {"num_beams": 2, "top_k": 20, "max_new_tokens": 40}
    with Pipeline.from_bundle(demo_bundle) as pipeline:
        for seed in range(3):
            plain = pipeline.generate(PROMPT, strategy="beam-sample", seed=seed, **common)
            planned = pipeline.generate(PROMPT, draft_policy="throughput", seed=seed, **common)
            assert planned.sequences[0].token_ids == plain.sequences[0].token_ids
    assert len(list((tmp_path / "dsbd-ort").glob("costs-*.json"))) == 1


def test_a_prompt_that_goes_on_from_the_last_computes_only_what_is_new(demo_bundle):
    options = {"num_beams": 2, "width_policy": "fixed", "top_k": 20, "max_new_tokens": 16}
    options["seed"] = 0
    with Pipeline.from_bundle(demo_bundle) as pipeline:
        first = pipeline.generate(PROMPT, **options)
        longer = PROMPT + first.sequences[0].text + "\n    return"
        again = pipeline.generate(longer, **options)
    with Pipeline.from_bundle(demo_bundle, prefix_cache=False) as pipeline:
        pipeline.generate(PROMPT, **options)
        alone = pipeline.generate(longer, **options)
    assert again.sequences[0].token_ids == alone.sequences[0].token_ids
    assert again.stats.target_rows < alone.stats.target_rows
    assert again.stats.kv_bytes_peak == alone.stats.kv_bytes_peak


OPTIONS: dict[str, Any] = {
    "strategy": "speculative",
    "draft_policy": "throughput",
    "max_new_tokens": 1,
}
CURVE = CostCurve((1, 2), (0.001, 0.002))


@pytest.fixture
def pipeline(tiny_bundle: Bundle) -> Pipeline:
    target, draft = load_pair(tiny_bundle, provider="cpu")
    return Pipeline(tiny_bundle, target, draft, lambda: EngineCosts(CURVE, CURVE))


@pytest.mark.parametrize("is_service", [False, True])
def test_many_temperatures_are_not_remembered_for_ever(
    pipeline: Pipeline, is_service: bool
) -> None:
    temperatures = np.linspace(0.5, 1.5, 2 * MOST_ESTIMATORS).tolist()
    asked = Service(pipeline) if is_service else pipeline
    for temperature in temperatures:
        asked.generate("x", temperature=temperature, **OPTIONS)
        asked.generate("x", temperature=temperatures[0], **OPTIONS)  # always of the latest used
    kept = [setting[2] for setting in pipeline._estimators.settings]  # type: ignore[index]
    assert kept == [*temperatures[1 - MOST_ESTIMATORS :], temperatures[0]]
    asked.close()
    pipeline.close()


def test_requests_of_one_setting_learn_together(pipeline: Pipeline) -> None:
    for _ in range(3):
        pipeline.generate("x", **{**OPTIONS, "max_new_tokens": 8})
    (setting,) = pipeline._estimators.settings
    estimator = pipeline._estimators.of(setting)
    assert pipeline._estimators.of(setting) is estimator
    pipeline.close()
