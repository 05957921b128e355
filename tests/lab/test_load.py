"""Measurements of servers and of wide requests run: seconds on a tiny bundle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lab.frame.page import RESULTS
from lab.frame.server_process import MemorySamples, sampled_memory
from lab.soak.mixed_load import Outcomes
from tests.lab.lab_run import lab_run


def test_outcomes_are_counted_and_the_unwanted_named():
    outcomes = Outcomes()
    for status, seconds in (("200", 0.1), ("200", 0.3), ("500", 0.2)):
        outcomes.add("plain", status, seconds)
    assert list(outcomes.table())[2:] == [
        "| plain | 200 | 2 | 200.0 | 298.0 | 300.0 |",
        "| plain | 500 | 1 | 200.0 | 200.0 | 200.0 |",
    ]
    assert outcomes.unwanted({"plain": {"200"}}) == ["1 x plain: 500"]
    assert outcomes.unwanted({"plain": {"200", "500"}}) == []


def test_the_line_through_the_memory_leaves_the_warm_up_out():
    seconds = [float(second) for second in range(101)]
    megabytes = [100.0 + 5 * second if second < 20 else 200 + second / 60 for second in seconds]
    assert MemorySamples(seconds, megabytes).slope_after(0.2) == pytest.approx(1.0)


def test_memory_that_is_taken_is_seen():
    code = "import time; time.sleep(0.5); held = bytes([1]) * 50_000_000; time.sleep(5)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        with sampled_memory(process.pid, 0.05) as samples:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
        process.kill()
    assert 45 < samples.megabytes[-1] - samples.megabytes[0] < 60


@pytest.mark.parametrize(
    ("name", "document", "section", "options"),
    [
        ("soak", RESULTS / "serving.md", "soak", ["--minutes", "0.03", "--clients", "2"]),
        (
            "serving",
            RESULTS / "serving.md",
            "serving",
            ["--rounds", "1", "--requests", "2", "--max-new-tokens", "4", "--wait", "0"],
        ),
        (
            "retrieval",
            RESULTS / "retrieval.md",
            "retrieval memory",
            ["--num-ids", "2000", "--width", "4", "--num-prompts", "2"],
        ),
    ],
)
def test_a_measurement_runs_and_writes_its_section(
    tmp_path, tiny_bundle, name, document, section, options
):
    assert f"<!-- {section} -->" in document.read_text()
    copy = tmp_path / "page.md"
    copy.write_text(f"before\n<!-- {section} -->\nold\n<!-- end of {section} -->\nafter\n")
    done = lab_run(name, tiny_bundle.path, "--document", copy, "--threads", 1, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    head, text, tail = copy.read_text().partition(done.stdout.strip())
    assert (head, tail) == (
        f"before\n<!-- {section} -->\n",
        f"\n<!-- end of {section} -->\nafter\n",
    )
    assert text.count("|") > 20
