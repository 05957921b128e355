"""Runs of a benchmark: their names, prompts, and the baselines that they get."""

import pytest

from dsbd_ort.benchmark.bench_run import (
    PROMPTS,
    BenchmarkError,
    BenchRun,
    CommonSettings,
    read_prompts,
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


BASELINES = [  # (strategy, that of its baseline, options of both, of the run alone)
    ("dsbd", "beam-sample", {"num_beams": 2, "top_k": 20}, {"draft_length": 3}),
    ("speculative", "sample", {"top_p": 0.9, "max_new_tokens": 8}, {}),
    ("tree-speculative", "sample", {}, {"draft_beams": 3}),
    ("tree-speculative", "sample", {}, {"replacement": True}),
    ("dsbd", "beam-sample", {"replacement": True}, {}),
    ("dsbd", "beam-sample", {"num_beams": 3, "early_stopping": "never"}, {}),
    ("speculative-beam-search", "beam-search", {"num_beams": 3, "early_stopping": True}, {}),
    ("mjsd", "greedy", {}, {"temperature": 0.0, "joint_threshold": 0.2}),
    ("mjgd", "greedy", {"max_new_tokens": 9}, {"temperature": 0.0}),
]


@pytest.mark.parametrize(("strategy", "of_baseline", "shared", "own"), BASELINES)
def test_a_run_gets_the_baseline_of_its_own_law(strategy, of_baseline, shared, own):
    made = run(strategy, **shared, **own)
    baseline, paired = with_baselines([made])
    assert baseline.options == {"strategy": of_baseline, **shared} and baseline.baseline is None
    assert paired.baseline == baseline.name and paired.options == made.options


def test_a_baseline_that_is_among_the_runs_is_not_run_twice():
    mine = run("beam-sample", given_name="mine", num_beams=2)
    others = (run("dsbd", num_beams=2), run("dsbd", num_beams=2, memory="single"))
    runs = with_baselines([*others, mine])
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
    configs = [r.config for r in runs if r.config.strategy == "dsbd"]
    policies = [(config.num_beams, config.width_policy) for config in configs]
    assert policies == [(2, "fixed"), (2, "threshold"), (3, "fixed"), (3, "threshold")]


def test_built_in_prompts_are_different_and_end_where_a_token_ends():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 8
    assert all(prompt.endswith(":") for prompt in PROMPTS)


def test_text_has_a_prompt_a_line_and_jsonl_an_object(tmp_path):
    text, jsonl = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("def f(x):\n\nclass A:\n")
    jsonl.write_text('{"prompt": "def f(x):\\n    y:"}\n{"prompt": "b", "id": 3}\n')
    assert read_prompts(text) == ["def f(x):", "class A:"]
    assert read_prompts(jsonl) == ["def f(x):\n    y:", "b"]


DAMAGED = [  # (file name, content, words of the message)
    ("a.txt", None, "cannot be read"),
    ("a.txt", "\n\n", "has no prompt"),
    ("a.jsonl", '{"prompt": "a"}\nnonsense\n', "line 2 is invalid JSON"),
    ("a.jsonl", '{"text": "a"}\n', 'no text under "prompt"'),
    ("a.jsonl", "[" * 100_000, "line 1 is invalid JSON"),
    ("a.jsonl", '["a"]\n', 'no text under "prompt"'),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_damaged_files_are_refused(tmp_path, name, content, words):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(BenchmarkError, match=words):
        read_prompts(file)
