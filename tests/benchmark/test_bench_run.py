"""Names of runs and the baselines that they get."""

from __future__ import annotations

import pytest

from dsbd_ort.benchmark.bench_run import (
    BenchmarkError,
    BenchRun,
    CommonSettings,
    runs_of,
    with_baselines,
)
from dsbd_ort.decoding import STRATEGIES, ConfigError


def run(strategy, given_name=None, baseline=None, **options):
    options = {"strategy": strategy, **options}
    return BenchRun(options=options, given_name=given_name, baseline=baseline)


NAMES = [
    (run("dsbd"), "dsbd W=4 fixed throughput 8x16"),
    (run("dsbd", num_beams=2, width_policy="fixed", draft_length=3), "dsbd W=2 fixed 3x2"),
    (run("dsbd", draft_beams=(6, 4), draft_length=2, top_k=9), "dsbd W=4 fixed 2x6/4"),
    (run("dsbd", memory="single"), "dsbd W=4 fixed 4x4 memory=single"),
    (run("dsbd", num_beams=2, draft_policy="throughput"), "dsbd W=2 fixed throughput 8x8"),
    (run("speculative", draft_length=5), "speculative 5x1"),
    (run("beam-search", num_beams=3), "beam-search W=3"),
    (run("sample", given_name="mine"), "mine"),
]


@pytest.mark.parametrize(("made", "name"), NAMES)
def test_names_say_what_sets_runs_apart(made, name):
    assert made.name == name


BASELINES = [  # (run, strategy and options of its baseline)
    (
        run("dsbd", num_beams=2, top_k=20, draft_length=3),
        {"strategy": "beam-sample", "num_beams": 2, "top_k": 20},
    ),
    (
        run("speculative", top_p=0.9, max_new_tokens=8),
        {"strategy": "sample", "top_p": 0.9, "max_new_tokens": 8},
    ),
    (run("tree-speculative", draft_beams=3), {"strategy": "sample"}),
    (run("tree-speculative", replacement=True), {"strategy": "sample"}),
    (run("dsbd", replacement=True), {"strategy": "beam-sample", "replacement": True}),
    (
        run("dsbd", num_beams=3, early_stopping="never"),
        {"strategy": "beam-sample", "num_beams": 3, "early_stopping": "never"},
    ),
    (
        run("speculative-beam-search", num_beams=3, early_stopping=True),
        {"strategy": "beam-search", "num_beams": 3, "early_stopping": True},
    ),
    (run("mjsd", temperature=0.0, joint_threshold=0.2), {"strategy": "greedy"}),
    (run("mjgd", temperature=0.0, max_new_tokens=9), {"strategy": "greedy", "max_new_tokens": 9}),
]


@pytest.mark.parametrize(("made", "options"), BASELINES)
def test_a_run_gets_the_baseline_of_its_own_law(made, options):
    baseline, paired = with_baselines([made])
    assert baseline.options == options and baseline.baseline is None
    assert paired.baseline == baseline.name and paired.options == made.options


def test_a_baseline_that_is_among_the_runs_is_not_run_twice():
    mine = run("beam-sample", given_name="mine", num_beams=2)
    runs = with_baselines([run("dsbd", num_beams=2), run("dsbd", num_beams=2, memory="single"), mine])  # fmt: skip # noqa: E501
    assert [r.baseline for r in runs] == ["mine", "mine", None]
    fixed, threshold = (run("dsbd", num_beams=2, width_policy=p) for p in ("fixed", "threshold"))
    runs = with_baselines([fixed, threshold])
    assert [r.name for r in runs] == ["beam-sample W=2", fixed.name, threshold.name]


def test_a_named_baseline_and_none_are_kept():
    runs = [run("sample"), run("dsbd", baseline="sample"), run("speculative", baseline="none")]
    assert with_baselines(runs) == runs


REFUSED = [  # (runs, words of the message)
    ([run("sample"), run("sample", temperature=1.0, given_name="sample")], "called 'sample'"),
    ([run("dsbd", baseline="x")], "baseline 'x', which is not a run"),
]


@pytest.mark.parametrize(("runs", "words"), REFUSED)
def test_runs_that_cannot_be_told_apart_or_compared_are_refused(runs, words):
    with pytest.raises(BenchmarkError, match=words):
        with_baselines(runs)


def test_senseless_options_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="num_beams"):
        run("sample", num_beams=3)
    with pytest.raises(BenchmarkError, match="seed"):
        run("sample", seed=3)


def test_every_strategy_runs_under_common_settings_at_every_width():
    common = CommonSettings(num_beams=(2, 3), draft_length=2, top_k=7, max_new_tokens=5)
    runs = runs_of(list(STRATEGIES), common)
    assert all(r.config.max_new_tokens == 5 for r in runs)
    assert {r.config.draft_length for r in runs if r.config.row.has_draft} == {2}
    assert {r.config.top_k for r in runs if r.config.row.rule == "sample"} == {7}
    widths = [r.config.num_beams for r in runs if r.config.strategy == "beam-search"]
    assert widths == [2, 3]
    policies = [(r.config.num_beams, r.config.width_policy) for r in runs if r.config.strategy == "dsbd"]  # fmt: skip # noqa: E501
    assert policies == [(2, "fixed"), (2, "threshold"), (3, "fixed"), (3, "threshold")]
