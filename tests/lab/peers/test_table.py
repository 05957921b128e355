"""The tables of tools and those of their results: every ratio and every bar has a counterpart."""

import json
import re

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsbd_ort.decoding import DecodingConfig
from lab.peers.catalog import OURS, TORCH
from lab.peers.comparison import COMPARISONS, STRATEGIES, next_to_busy
from lab.peers.prepare import RUNNERS
from lab.peers.report import tables_of

ROW = {
    "peer": "tool",
    "run": "beam search W=4",
    "precision": "int8",
    "counterpart": "ours W=4",
    "same_tokens_as": "beam-search W=4",
    "reason": None,
    "version": "1.2",
    "settings": "type int8",
    "num_requests": 24,
    "num_tokens": 47.5,
    "tokens_per_s": {"median": 50.04, "quartile_1": 40.0, "quartile_3": 60.0},
    "ratio": {"value": 1.5, "low": 1.25, "high": 2.0},
    "num_identical": 23,
    "peak_bytes": 600_000_000,
    "undrafted": "sampling",
    "speedup": {"value": 1.25, "low": 1.0, "high": 1.5},
    "num_valid": 22,
    "tokens_per_iteration": 2.345,
    "logprob": {"value": -0.9, "low": -1.0, "high": -0.8},
}
EMPTY = dict.fromkeys(ROW) | {"peer": "other", "run": "sampling", "precision": "fp32"}
SEARCHES = {
    "seconds": {"median": 0.25, "quartile_1": 0.2, "quartile_3": 0.3},
    "legal_per_s": {"median": 250.0, "quartile_1": 240.0, "quartile_3": 260.0},
    "num_returned": 400,
    "num_legal": 399,
    "num_same": 23,
    "score_difference": 2e-6,
}
BAR = {"ours": "ours W=4", "peer": "tool", "run": "beam search W=4", "precision": "int8"}
REPORT = {
    "created": "2026-11-21T10:00:00+00:00",
    "params": "150M",
    "machine": {"processor": "CPU"},
    "threads": 2,
    "rounds": 3,
    "max_new_tokens": 48,
    "prompts": [[0]] * 8,
    "rows": [ROW, EMPTY | {"reason": "not installed: no wheel\nfor a | b\nstate: 0"}],
    "bars": [
        BAR | {"aim": 1.5, "ratio": {"value": 1.5, "low": 1.25, "high": 2.0}},
        BAR | {"aim": 4.0, "ratio": None},
    ],
}


HEAD = "| tool | 1.2 | int8 | beam search W=4 | 50.0 (40.0 to 60.0) |"
RATIO, TAIL = "**1.50** (1.25 to 2.00) of ours W=4 |", "600 | 23/24 as beam-search W=4 |"


def test_rows_failures_settings_and_bars():
    lines = tables_of(REPORT).splitlines()
    assert f"{HEAD} {RATIO} **-0.90** (-1.00 to -0.80) | {TAIL}" in lines
    failed = r"| other |  | fp32 | sampling | not installed: no wheel for a \| b |  |  |  |  |"
    assert failed in lines
    assert "* tool, int8: type int8." in lines
    over = "| ours W=4 | tool, beam search W=4 | int8 |"
    assert f"{over} 1.5 | **1.50** (1.25 to 2.00) |" in lines
    assert f"{over} 4 | not measured |" in lines
    assert any("150M twin, CPU, 2 threads, 8 prompts x 3 rounds, 48 new" in line for line in lines)


def test_a_table_of_schemas_counts_valid_documents_and_has_no_bars():
    lines = tables_of(REPORT | {"comparison": "schemas", "bars": []}).splitlines()
    assert f"{HEAD} 47.5 | 22/24 | {RATIO} {TAIL}" in lines
    assert lines[-1] == "* tool, int8: type int8."


def test_a_table_of_retrieval_has_times_of_requests_and_illegal_sequences():
    row = ROW | {"searches": SEARCHES, "same_search_as": "beam-search W=4"}
    row["time_ratio"] = {"value": 2.5, "low": 2.0, "high": 3.0}
    speedup = "**1.25** (1.00 to 1.50)"
    unchecked = row | {"searches": SEARCHES | {"num_same": None}, "time_ratio": None}
    unchecked["speedup"] = None
    other = row | {"searches": SEARCHES | {"num_same": 0, "score_difference": None}}
    found = {"comparison": "retrieval", "rows": [row, unchecked, other], "bars": []}
    lines = tables_of(REPORT | found).splitlines()
    head = "| tool | 1.2 | int8 | beam search W=4 | 250.0 (200.0 to 300.0) | 250.0 (240.0 to 260.0)"
    ratio = "**2.50** (2.00 to 3.00) of ours W=4"
    same = "as beam-search W=4"
    for cells in (
        f"{speedup} | {ratio} | 600 | 23/24 {same}, within 2e-06",
        " |  | 600 | ",
        f"{speedup} | {ratio} | 600 | 0/24 {same}",
    ):
        assert f"{head} | 0.2% of 400 | {cells} |" in lines


def test_tables_say_that_a_core_was_taken():
    said = "2 threads, another process on one of the cores, 8 prompts"
    assert said in tables_of(REPORT | {"is_busy": True})
    assert said not in tables_of(REPORT)


def test_on_a_busy_machine_the_aim_is_to_be_no_slower():
    quiet = COMPARISONS[STRATEGIES]
    busy = next_to_busy(quiet)
    assert (quiet.section, busy.section) == ("peers", "peers, busy")
    assert {bar.aim for bar in busy.bars} == {1.0} and len(busy.bars) == len(quiet.bars) > 0


CASES = [(comparison, peer) for comparison in COMPARISONS.values() for peer in comparison.peers]
IDS = [f"{comparison.name}-{peer.name}" for comparison, peer in CASES]
every_tool = pytest.mark.parametrize(("comparison", "peer"), CASES, ids=IDS)
every_comparison = pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)


def our_runs(comparison):
    (ours,) = (peer for peer in comparison.peers if peer.name == OURS)
    return {(run.name, run.precision): run for run in ours.runs}


@every_tool
def test_runners_counterparts_and_names(comparison, peer):
    ours = our_runs(comparison)
    own = {(run.name, run.precision) for run in peer.runs}
    assert len(own) == len(peer.runs)
    for run in peer.runs:
        assert run.unable is not None or (RUNNERS / f"{peer.runner}.py").is_file()
        for name in (run.counterpart, run.same_tokens_as):
            assert name is None or (name, run.precision) in ours
        assert run.undrafted is None or (run.undrafted, run.precision) in own


@every_comparison
def test_our_runs_are_configurations(comparison):
    for (name, _), run in our_runs(comparison).items():
        config = DecodingConfig(**dict(run.options))
        width = int((re.findall(r"W=(\d+)", name) or [1])[0])
        assert config.num_beams == width
        assert (config.width_policy == "threshold") == ("at least" in name)


def test_bars_name_rows():
    comparison = COMPARISONS[STRATEGIES]
    keys = {(peer.name, run.name, run.precision) for peer in comparison.peers for run in peer.runs}
    for bar in comparison.bars:
        assert (bar.peer, bar.run, bar.precision) in keys
        assert (bar.ours, bar.precision) in our_runs(comparison)


@every_tool
def test_torch_is_pinned_first_and_stays(comparison, peer):
    calls = [words for words in peer.installs if "--no-deps" not in words]
    assert all(TORCH in words for words in calls)


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@every_comparison
@pytest.mark.parametrize("number", [1, 8])
def test_prompts_are_so_many_and_all_different(comparison, number):
    prompts = comparison.prompts(byte_tokenizer(), number)
    assert len(prompts) == number
    given = [*prompts, comparison.warm_up(byte_tokenizer())]
    assert len({(tuple(each.token_ids), each.json_schema) for each in given}) == number + 1
    for schema in (prompt.json_schema for prompt in prompts):
        if schema is not None:
            jsonschema.Draft202012Validator.check_schema(json.loads(schema))
