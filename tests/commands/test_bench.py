"""dsbd-bench as a person meets it: table, JSON, plots, one-line errors."""

import json
import re
from functools import partial

import pytest

from dsbd_ort.cli import bench
from tests.commands.calls import assert_one_line_error, called
from tests.exports import export_demo_pair
from tests.runtime.bundle_edits import edited, without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

dsbd_bench = partial(called, bench)
SHORT = ["--max-new-tokens", "6", "--threads", "1"]
SPECULATIVE = ["--run", "speculative draft_length=3 name=mine"]

REPORT_KEYS = {
    "schema_version", "created", "bundle", "machine", "versions", "provider",
    "draft_provider", "threads", "cuda_graphs", "energy_counters", "repetitions",
    "seed", "prompts", "runs", "measurements",
}  # fmt: skip
RUN_KEYS = {
    "name", "settings", "tokens_per_s", "time_to_first_token_s", "logprob_per_token",
    "seconds_per_token", "host_us_per_iteration", "mean_acceptance_length",
    "draft_acceptance_rate", "acceptance_histogram", "mean_beam_width",
    "target_rows_per_iteration", "draft_rows_per_iteration", "kv_bytes_peak",
    "energy_joules_per_token", "comparison",
}  # fmt: skip
COMPARISON_KEYS = {
    "baseline", "speedup", "logprob_difference", "num_pairs", "num_identical", "is_identical",
}  # fmt: skip
MEASUREMENT_KEYS = {
    "run", "prompt_index", "repetition", "seed", "seconds", "token_ids", "logprob",
    "energy_joules", "stats",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("def f(x):\nclass A:\n")
    return file


@pytest.fixture(scope="module")
def measured(demo_bundle, prompts, tmp_path_factory):
    """One run of the command, its JSON and its picture."""
    folder = tmp_path_factory.mktemp("bench")
    done = dsbd_bench(
        demo_bundle, "--prompts", prompts, "--strategies", "dsbd", "--num-beams", 2,
        "--repetitions", 2, "--seed", 5, "--json", folder / "bench.json",
        "--plot", folder / "bench.svg", *SPECULATIVE, *SHORT,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return done, json.loads((folder / "bench.json").read_text()), folder / "bench.svg"


def test_advice_refuses_options_that_it_would_not_use(demo_bundle, tmp_path):
    done = dsbd_bench(demo_bundle, "--advise", "--strategies", "dsbd", "--json", tmp_path / "x")
    assert_one_line_error(done, "leave out --strategies, --json")
    assert not (tmp_path / "x").exists()


def test_advice_ends_with_what_pays(demo_bundle, prompts):
    done = dsbd_bench(demo_bundle, "--advise", "--prompts", prompts, "--threads", 1)
    assert done.exit_code == 0, done.output
    assert "draft, ms" in done.stdout and "expected" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert re.match(r"It pays most for .*: \d\.\d\d\.|No strategy gains", last)


def test_tables_go_to_stdout_and_progress_to_stderr(measured):
    done, _, _ = measured
    for name in (
        "beam-sample W=2",
        "dsbd W=2 fixed throughput 8x8",
        "dsbd W=2 threshold 4x2",
        "mine",
    ):
        is_verdict = not name.startswith("beam-sample")
        assert done.stdout.count(name) == 2 + is_verdict
    assert "speed-up" in done.stdout and "measuring" not in done.stdout
    assert "warming up" in done.stderr and "measuring" in done.stderr


def test_json_has_the_documented_names(measured):
    _, report, _ = measured
    assert set(report) == REPORT_KEYS and report["schema_version"] == 1
    assert all(set(run) == RUN_KEYS for run in report["runs"])
    compared = [run["comparison"] for run in report["runs"] if run["comparison"]]
    assert len(compared) == 3 and all(set(c) == COMPARISON_KEYS for c in compared)
    assert all(set(m) == MEASUREMENT_KEYS for m in report["measurements"])
    assert report["bundle"]["target"]["dtype"] == "fp32" and report["threads"] == 1
    assert {"python", "numpy", "onnxruntime", "dsbd-ort"} <= set(report["versions"])


def test_every_run_is_measured_on_every_prompt_in_every_repetition(measured):
    _, report, _ = measured
    names = [run["name"] for run in report["runs"]]
    found = [(m["repetition"], m["prompt_index"], m["run"]) for m in report["measurements"]]
    order = {0: names, 1: names[::-1]}
    assert found == [(r, p, name) for r in (0, 1) for p in (0, 1) for name in order[r]]
    assert [m["seed"] for m in report["measurements"][:: len(names)]] == [5, 6, 7, 8]


def test_strategies_that_promise_it_give_the_baseline_s_tokens(measured):
    _, report, _ = measured
    runs = {run["name"]: run for run in report["runs"]}
    for name in ("dsbd W=2 fixed throughput 8x8", "mine"):
        comparison = runs[name]["comparison"]
        assert comparison["is_identical"] and comparison["num_pairs"] == 4
        assert comparison["logprob_difference"]["value"] == pytest.approx(0.0, abs=1e-4)
        assert comparison["speedup"]["low"] <= comparison["speedup"]["value"]
    assert runs["mine"]["comparison"]["baseline"] == "sample"


def test_the_picture_is_drawn(measured):
    _, _, picture = measured
    text = picture.read_text()
    for title in ("speed-up over the baseline", "time split", "accepted layers", "quality over"):
        assert title in text


USER_ERRORS = [  # (arguments after the bundle, words of the message)
    (["--strategies", "magic"], "strategy is 'magic'; expected one of dsbd"),
    (["--run", "magic"], "strategy is 'magic'; expected one of dsbd"),
    (["--run", ""], "names no strategy"),
    (["--run", "dsbd 'num"], "names no strategy"),
    (["--run", "dsbd colour=3"], "has 'colour=3'; expected key=value"),
    (["--run", "dsbd num_beams"], "has 'num_beams'; expected key=value"),
    (
        ["--run", "dsbd num_beams=many"],
        "num_beams=many: num_beams is 'many'; expected a whole number",
    ),
    (["--run", "sample num_beams=2"], "num_beams is 2, which means nothing to strategy sample"),
    (["--run", "sample seed=2"], "seed is set to 2"),
    (["--run", "dsbd baseline=x"], "baseline 'x', which is not a run"),
    (["--run", "sample", "--run", "sample"], "2 runs are called 'sample'"),
    (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
    (["--json", "/no/such/folder/a.json"], "no folder /no/such/folder"),
    (["--plot", "a.doc"], "end its name in one of"),
    (["--repetitions", "0"], "0"),
    (["--provider", "tpu"], "tpu"),
    (["--draft-provider", "tpu"], "tpu"),
    (["--cuda-graphs"], "cuda_graphs is set, but provider 'cpu' has none"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS)
def test_user_errors_end_in_one_line_and_exit_code_2(demo_bundle, arguments, words):
    assert_one_line_error(dsbd_bench(demo_bundle, *arguments), words)


INVARIANCE = ["--check-invariance", "--repetitions", 1, *SHORT]
PAIRS = [
    "dsbd W=2 / beam-sample",
    "speculative W=1 / sample",
    "speculative-beam-search W=2 / beam-search",
    "with others / alone",
    "rows kept from an earlier prompt / computed anew",
    "8 at a time, of mixed strategies / alone",
    "1 / 2 threads",
]


def counts_of(output):
    """Return requests, those with other tokens, those with other log-probabilities, by pair."""
    rows = (line.split("\u2502")[1:5] for line in output.splitlines() if "\u2502" in line)
    return {name.strip(): [int(cell) for cell in cells] for name, *cells in rows}


@pytest.fixture(scope="module")
def fused_bundle(captures, tmp_path_factory):
    """The demo pair in int8-dynamic, without the attention that makes it bit-exact."""
    folder = tmp_path_factory.mktemp("int8") / "fused"
    return export_demo_pair(captures, folder, quantize="int8-dynamic", attention="fused")


def test_requests_of_a_bit_exact_bundle_are_the_same_however_computed(int8_bundle, prompts):
    done = dsbd_bench(int8_bundle, "--prompts", prompts, "--num-beams", 2, *INVARIANCE)
    assert done.exit_code == 0, done.output
    assert "bit-exact: observed" in done.stdout
    assert counts_of(done.stdout) == {pair: [2, 0, 0] for pair in PAIRS}


def test_requests_of_another_bundle_are_counted(fused_bundle, prompts):
    """Fused attention differs; where the manifest denies it, that is an error."""
    bundle = fused_bundle
    done = dsbd_bench(bundle, "--prompts", prompts, "--num-beams", 2, *INVARIANCE)
    assert done.exit_code == 0, done.output
    counts = counts_of(done.stdout)
    assert list(counts) == PAIRS
    assert sum(other_logprobs for *_, other_logprobs in counts.values()) > 0
    edited(bundle, lambda data: data["target"].update(bit_exact="observed"))
    done = dsbd_bench(bundle, "--prompts", prompts, "--num-beams", 2, *INVARIANCE)
    assert done.exit_code == 2
    assert re.search(r"\d+ requests differ, but .*fused says bit_exact 'observed'", done.stderr)


def test_a_bundle_without_a_draft_has_no_pairs_of_strategies(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    without_draft(tmp_path / "bundle", TinyModel())
    done = dsbd_bench(tmp_path / "bundle", "--num-beams", 2, *INVARIANCE)
    assert done.exit_code == 0, done.output
    assert list(counts_of(done.stdout)) == PAIRS[3:]
