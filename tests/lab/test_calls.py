"""Engine calls side by side: the rounds, the random calls, the choices."""

import os
import re
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from dsbd_runtime.bundle_files.bundle import open_bundle
from lab.frame.random_calls import RandomCalls, product_bytes
from lab.frame.rounds import time_in_rounds
from scripts.machine import _ticks, one_core_taken, wait_until_idle
from tests.lab.lab_run import RESULTS, lab_run
from tests.runtime.bundle_edits import edited
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle


class Work:
    def __init__(self):
        self.now = 0.0
        self.log = ""

    def takes(self, name, seconds):
        def call():
            self.log += name
            self.now += next(seconds)

        return call


def test_rounds_alternate_and_leave_out_the_first_call():
    work = Work()
    slow_first = [9.0, 0.001, 0.002, 0.003, 9.0, 0.004, 0.004, 0.004]
    calls = {
        "a": work.takes("a", iter(slow_first)),
        "b": work.takes("b", iter([9.0, 0.004, 0.004, 0.004, 9.0, 0.002, 0.002, 0.002])),
    }
    found = time_in_rounds(calls, num_rounds=2, calls_a_round=3, pause_s=0, clock=lambda: work.now)
    assert work.log == "aaaabbbbbbbbaaaa"
    assert found.medians["a"] == pytest.approx([2, 4])
    assert found.medians["b"] == pytest.approx([4, 2])
    assert found.milliseconds("a").median == pytest.approx(3)
    assert found.ratio("b", "a").median == pytest.approx((4 / 2 + 2 / 4) / 2)


def test_random_calls_are_steps_of_that_many_rows_after_full_caches(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    path, entry = bundle.model_path("target"), bundle.entry("target")
    of_rows = {"row_counts": (1, 3), "capacity": 16, "options": ort.SessionOptions()}
    calls = RandomCalls(path.read_bytes(), path.parent, entry, **of_rows)
    for rows in (1, 3):
        before = {key: value.numpy().copy() for key, value in calls.caches.items()}
        calls.call_of(rows)()
        for key, value in calls.caches.items():
            is_same = (value.numpy() == before[key]).all(axis=(0, 1, 3))  # (C,)
            np.testing.assert_array_equal(is_same, np.arange(16) < 16 - rows)


def measured_calls(document, *bundles, settings=()):
    options = ["--threads", 1, "--rounds", 1, "--openings", 1, "--document", document, "--wait", 0]
    chosen = [word for setting in settings for word in ("--setting", setting)]
    return lab_run("calls", *bundles, *options, *chosen)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Two bundles with room for 4,096 rows whose manifests say fp32, one that says int8-dynamic."""
    folder = tmp_path_factory.mktemp("twins")
    for name in ("fused", "exact", "int8"):
        model = TinyModel(context_length=4096)
        write_tiny_bundle(folder / name, target=model, draft=model)
        if name == "int8":
            edited(folder / name, lambda data: data["target"].update(quantization="int8-dynamic"))
    return folder


SECTIONS = {
    "calls, int8": ("int8", "int8, does not wait"),
    "calls, fp32": ("fused", "fused, does not wait", "exact", "exact, does not wait"),
}
SPREAD = r"[\d.]+ \([\d.]+ to [\d.]+\)"
RATIO = SPREAD.replace(r"[\d.]+ ", r"\*\*[\d.]+\*\* ", 1)


def test_engines_of_a_precision_share_a_table(twins, tmp_path):
    page = (RESULTS / "calls.md").read_text()
    assert all(f"<!-- {name} -->" in page for name in SECTIONS)
    document = tmp_path / "page.md"
    sections = (f"<!-- {name} -->\nold\n<!-- end of {name} -->" for name in SECTIONS)
    document.write_text("\n".join(sections))
    bundles = (twins / name for name in ("fused", "int8", "exact"))
    done = measured_calls(document, *bundles, settings=("today", "does not wait"))
    assert done.returncode == 0, done.stderr
    for section, engines in SECTIONS.items():
        _, _, text = document.read_text().partition(f"<!-- {section} -->\n")
        calls, bandwidths, openings, note = text.partition("\n<!--")[0].split("\n\n")
        head, _, *rows = calls.splitlines()
        words = "| context | rows | engine | ms | ratio | / context 256 | busy, ms |"
        assert head.startswith(words)
        assert [row.split(" | ")[:3] for row in rows] == [
            [f"| {context}", f"{count}", engine]
            for context in (64, 256, 1024, 4096)
            for count in (1, 4, 12, 20)
            for engine in engines
        ]
        for row in rows:
            ratio = "" if f" | {engines[0]} | " in row else RATIO
            cells = rf"\| {SPREAD} \| {ratio} \| [\d.]+ \| {SPREAD} \| \*\*[\d.]+\*\* \|$"
            assert re.search(cells, row), row
        assert [row.split(" | ")[0] for row in bandwidths.splitlines()[2:]] == [
            f"| {engine}" for engine in engines
        ]
        names = dict.fromkeys(engine.partition(",")[0] for engine in engines)
        twice = [name for name in names for _ in "12"]
        for row, name in zip(openings.splitlines()[2:], twice, strict=True):
            assert re.fullmatch(rf"\| {name}, (as it is|prepared)( \| [\d.]+){{4}} \|", row), row
        assert "1 rounds of 3 calls" in note and "% idle before" in note


def test_precisions_together_share_a_table_of_chosen_rows(twins, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- rows, precisions -->\nold\n<!-- end of rows, precisions -->")
    options = ["--together", "--rows", 1, "--rows", 3, "--context", 64, "--openings", 0]
    options += ["--no-busy", "--rounds", 1, "--wait", 0, "--section", "rows"]
    options += ["--document", document, "--threads", 1]
    done = lab_run("calls", twins / "int8", twins / "fused", *options)
    assert done.returncode == 0, done.stderr
    calls, _, note = document.read_text().partition("\n-->")[0].split("\n\n")[:3]
    rows = [row.split(" | ")[:3] for row in calls.splitlines() if row.startswith("| 64")]
    assert rows == [["| 64", count, name] for count in "13" for name in ("int8", "fused")]
    assert "onnxruntime" in note


def test_the_bytes_of_products_are_those_of_their_weights(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    path = open_bundle(tmp_path / "bundle").model_path("target")
    graph = onnx.load(path).graph
    read = {name for node in graph.node if node.op_type == "MatMul" for name in node.input[1:2]}
    sizes = {tensor.name: numpy_helper.to_array(tensor).nbytes for tensor in graph.initializer}
    assert product_bytes(path) == sum(sizes[name] for name in read if name in sizes) > 0


def test_calls_that_cannot_be_compared_are_refused(twins, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- calls, fp32 -->\n<!-- end of calls, fp32 -->")
    write_tiny_bundle(tmp_path / "short")
    refused = {
        "the fp32 bundles are fused, fused; they need different": ("fused", "fused"),
        "a context of 2048, expected 4096 or more": (tmp_path / "short", "fused"),
        "has no section from <!-- calls, int8 -->": ("int8",),
    }
    for words, names in refused.items():
        done = measured_calls(document, *(twins / name for name in names))
        assert done.returncode != 0 and words in " ".join(done.stderr.split()), done.stderr


def test_idle_is_what_no_core_computed(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 5 80 5 0 0 0 0 0\ncpu0 1 1 1 1\n")
    assert _ticks(stat) == (85, 100)
    assert wait_until_idle(0, stat) == 0  # nothing moved: no tick was idle


def test_one_core_is_taken_while_it_lasts():
    before = children()  # of other tests in this process
    with one_core_taken():
        (process,) = children() - before
        first = cpu_ticks(process)
        time.sleep(0.5)
        assert cpu_ticks(process) > first
        assert os.getsid(process) == process != os.getsid(0)
    assert process not in children()


def children():
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if stat_of(pid)[1:2] == [str(os.getpid())]}


def cpu_ticks(pid):
    return int(stat_of(pid)[11])


def stat_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
