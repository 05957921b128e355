"""What the drafting policy has learned is kept for as many settings as may be, the latest used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsbd_ort import Pipeline, Service
from dsbd_ort.decoding.cost_curve import CostCurve, EngineCosts
from dsbd_ort.model_pair import MOST_ESTIMATORS
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.loading import load_pair

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
