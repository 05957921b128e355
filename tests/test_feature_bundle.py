"""A bundle with a feature draft: every strategy returns what it returns without drafts."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner

from dsbd_ort.cli import inspect
from dsbd_ort.decoding.drafting.cost_curve import MEASURED_ROWS, measure_costs
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_pair
from tests.runtime.feature_pair import DRAFT, TARGET
from tests.runtime.tiny_graph import write_tiny_bundle


@pytest.fixture(scope="module")
def feature_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("features") / "bundle"
    write_tiny_bundle(path, target=TARGET, draft=DRAFT)
    return open_bundle(path, verify=True)


def test_costs_of_a_feature_draft_can_be_measured(feature_bundle: Bundle) -> None:
    target, draft = load_pair(feature_bundle, settings=EngineSettings(num_threads=1))
    ticks = itertools.count()
    with target, draft:
        costs = measure_costs(target, draft, lambda: float(next(ticks)))
    assert costs.target.seconds == costs.draft.seconds == (1.0,) * len(MEASURED_ROWS)
    assert target.num_rows == draft.num_rows == 0


def test_inspect_says_what_is_returned_and_read(feature_bundle: Bundle) -> None:
    done = CliRunner().invoke(inspect, [str(feature_bundle.path)])
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if "layers 2, 0" in line]
    assert "features" in line and "returns what enters layers 2, 0" in line
    assert "reads 64, or 32 of its own" in line
    told = json.loads(CliRunner().invoke(inspect, [str(feature_bundle.path), "--json"]).stdout)
    assert told["target"]["features"] == {"width": 64, "layers": [2, 0], "own_width": None}
    assert told["draft"]["features"] == {"width": 64, "layers": None, "own_width": 32}
