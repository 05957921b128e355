"""The tables of the results, and when they go into the document."""

import dataclasses
import json

import pytest

from lab.gpu.families import Case, difference
from lab.gpu.report import (
    BITS_COLUMNS,
    bench_rows,
    bits_rows,
    family_rows,
    forward_rows,
    main,
    parity_rows,
)
from lab.gpu.runner import FAILED, Result, ResultFolder

BEFORE = "# GPUs\n\n<!-- gpu -->\nNothing was run.\n<!-- end of gpu -->\n\nthe rest\n"


def run(name, seconds, joules, comparison=None):
    return {
        "name": name, "tokens_per_s": {"median": 1 / seconds}, "kv_bytes_peak": 2_500_000,
        "seconds_per_token": {"draft": 0.0, "target": 0.9 * seconds, "host": 0.1 * seconds},
        "energy_joules_per_token": joules, "comparison": comparison,
    }  # fmt: skip


SPEEDUP = {
    "baseline": "beam-sample W=2", "num_identical": 7, "num_pairs": 8,
    "speedup": {"value": 2.5, "low": 2.25, "high": 2.75},
}  # fmt: skip


def result(piece, began, **values):
    return Result(piece=piece, state="done", began=f"2026-01-02T03:{began}", values=values)


RUNS = [run("beam-sample W=2", 0.01, 0.5), run("dsbd W=2", 0.004, 0.25, SPEEDUP)]
BENCH = result("bench-demo", "04:05", provider="cuda", runs=RUNS)
PARITY = result(
    *("parity-demo", "04:00"),
    num_compared=6, num_identical=4, num_near_ties=1, gaps=[0.0005, None], gap_limit=0.001,
    mean_variation=1e-6, max_variation=2e-5, variation_limit=1e-3, is_within_limits=False,
)  # fmt: skip
COUNTS = {
    kind: {"num_ways": 20, "num_other_ways": n, "num_logits": 1000, "num_other_logits": 9 * n}
    for n, kind in enumerate(BITS_COLUMNS[1:])
}
BITS = result("bits-demo", "04:02", provider="cuda", counts=COUNTS)
TIMES = {"as it is": {"1 row": 0.5}, "--no-cuda-graphs": {"1 row": 1.5}}
FORWARDS = result("forwards-demo", "04:01", provider="cuda", milliseconds=TIMES)
GPU = {"name": "NVIDIA H200", "driver_version": "580.1"}
VERSIONS = {"python": "3.12.3", "onnxruntime-gpu": "1.31.1"}
MACHINE = result("machine", "03:00", gpus=[GPU], versions=VERSIONS)
BROKEN = Result(
    piece="bench-demo-no-graphs", state=FAILED, reason="exit code 2: Error: no", began="2026-01-03"
)


def test_a_row_has_speed_up_identical_tokens_host_share_memory_and_energy():
    rows = bench_rows([BENCH, PARITY, BROKEN])
    assert rows == [
        ("demo", "beam-sample W=2", "100.0", "-", "-", "-", "10", "2.5", "0.500", "-"),
        ("demo", "dsbd W=2", "250.0", "2.50", "2.25 to 2.75", "7/8", "10", "2.5", "0.250", "2.00"),
    ]


def test_energy_that_was_not_measured_is_left_out():
    runs = [run("beam-sample W=2", 0.01, None), run("dsbd W=2", 0.004, None, SPEEDUP)]
    bench = dataclasses.replace(BENCH, values={**BENCH.values, "runs": runs})
    assert [row[-2:] for row in bench_rows([bench])] == [("-", "-")] * 2


def test_near_ties_and_the_largest_gap_are_shown():
    assert parity_rows([PARITY]) == [
        ("demo", "4/6", "1/2 (gap up to 0.001)", "beyond top-k", "1.0e-06",
         "2.0e-05 (limit 0.001)", "beyond limits"),
    ]  # fmt: skip


def test_ways_that_differ_are_shown_by_kind():
    assert bits_rows([PARITY, BITS, BROKEN]) == [
        ("demo", "0/20 (0.0e+00)", "1/20 (9.0e-03)", "2/20 (1.8e-02)", "3/20 (2.7e-02)"),
    ]  # fmt: skip


def test_forwards_are_shown_by_setting():
    assert forward_rows([FORWARDS, BITS]) == [
        ("demo", "as it is", "0.500", "-", "-", "-"),
        ("demo", "--no-cuda-graphs", "1.500", "-", "-", "-"),
    ]


def test_families_show_the_largest_difference_and_what_is_beyond_the_limit():
    found = [("a fp32", 1e-6, ""), ("b fp32", 2e-3, ""), ("c fp32", None, "refused")]
    cases = [{"case": c, "dtype": "fp32", "difference": d, "reason": r} for c, d, r in found]
    result = dataclasses.replace(BITS, piece="families", values={"cases": cases})
    assert family_rows([result]) == [("fp32", "3", "2.0e-03 (b fp32)", "b fp32", "c fp32: refused")]


def test_a_family_is_compared_with_the_cpu_or_has_a_reason():
    same = difference(Case(family="llama", dtype="fp32"), "cpu")
    assert same == {"case": "llama fp32", "dtype": "fp32", "difference": 0.0, "reason": ""}
    refused = difference(Case(family="llama", dtype="fp32"), "cuda")
    assert refused["difference"] is None and "cuda" in refused["reason"]


@pytest.mark.parametrize("provider", ["cuda", "webgpu", "cpu"])
def test_the_document_changes_only_when_a_gpu_was_measured(tmp_path, provider):
    document, results = tmp_path / "gpu.md", ResultFolder(tmp_path / "results")
    document.write_text(BEFORE)
    for result in (MACHINE, PARITY, BITS, BENCH, FORWARDS, BROKEN):
        values = result.values
        if "provider" in values:
            values = {**values, "provider": provider}
        results.write(dataclasses.replace(result, values=values))
    main(tmp_path, document)
    assert "dsbd W=2" in (tmp_path / "tables.txt").read_text()
    assert [entry["piece"] for entry in json.loads((tmp_path / "gpu.json").read_text())] == [
        "machine", "parity-demo", "forwards-demo", "bits-demo", "bench-demo",
        "bench-demo-no-graphs",
    ]  # fmt: skip
    first_line = (tmp_path / "tables.txt").read_text().splitlines()[0]
    assert "NVIDIA H200, 580.1; python 3.12.3" in first_line
    if provider != "cuda":
        assert document.read_text() == BEFORE
        return
    text = document.read_text()
    for words in (
        "| 3/20 (2.7e-02) |", "2026-01-02", "NVIDIA H200, 580.1", "onnxruntime-gpu 1.31.1",
        "| 2.25 to 2.75 | 7/8 |",
        "bench-demo-no-graphs: failed, exit code 2: Error: no",
        "| demo | calls | --no-cuda-graphs | 1.500 | - | - | - | 3.00 |",
        "To take for demo: calls recorded (the other takes 3.00 of its time).\n<!-- end",
    ):  # fmt: skip
        assert words in text
    assert "Nothing was run." not in text and text.endswith("the rest\n")
