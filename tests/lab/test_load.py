"""Measurements of servers and of wide requests run: seconds on a tiny bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_runtime.bundle_files.bundle import Bundle
from lab.frame.page import RESULTS
from lab.frame.server_process import MemorySamples, sampled_memory
from lab.soak.mixed_load import Outcomes
from tests.lab.lab_run import lab_run


def test_outcomes_are_counted_and_the_unwanted_named() -> None:
    outcomes = Outcomes()
    for status, seconds in (("200", 0.1), ("200", 0.3), ("500", 0.2)):
        outcomes.add("plain", status, seconds)
    assert list(outcomes.table())[2:] == [
        "| plain | 200 | 2 | 200.0 | 298.0 | 300.0 |",
        "| plain | 500 | 1 | 200.0 | 200.0 | 200.0 |",
    ]
    assert outcomes.unwanted({"plain": {"200"}}) == ["1 x plain: 500"]
    assert outcomes.unwanted({"plain": {"200", "500"}}) == []


def test_the_line_through_the_memory_leaves_the_warm_up_out() -> None:
    seconds = [float(second) for second in range(101)]
    megabytes = [100.0 + 5 * second if second < 20 else 200 + second / 60 for second in seconds]
    assert MemorySamples(seconds, megabytes).slope_after(0.2) == pytest.approx(1.0)


def test_memory_that_is_taken_is_seen() -> None:
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
        ("streams", RESULTS / "serving.md", "streams", ["--max-new-tokens", "4"]),
        (
            "retrieval",
            RESULTS / "retrieval.md",
            "retrieval memory",
            ["--num-ids", "2000", "--width", "4", "--num-prompts", "2"],
        ),
    ],
)
def test_a_measurement_runs_and_writes_its_section(
    tmp_path: Path,
    tiny_bundle: Bundle,
    name: str,
    document: Path,
    section: str,
    options: list[str],
) -> None:
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


def test_a_count_of_requests_goes_on_where_it_ended(tmp_path: Path, tiny_bundle: Bundle) -> None:
    assert "<!-- invariance -->" in (RESULTS / "invariance.md").read_text()
    page = tmp_path / "page.md"
    page.write_text("<!-- invariance -->\n<!-- end of invariance -->")

    def cells(num_requests: int, minutes: float) -> list[list[str]]:
        options = ["--requests", num_requests, "--num-beams", 2, "--max-new-tokens", 4]
        files = ["--record", tmp_path / "record.json", "--document", page]
        options += ["--minutes", minutes, "--threads", 1]
        done = lab_run("invariance", "requests", tiny_bundle.path, *options, *files)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip() in page.read_text()
        return [line.split(" | ")[1:4] for line in done.stdout.splitlines() if "`tiny`" in line]

    first = cells(8, 1)
    assert {requests for _, requests, _ in first} == {"8"}
    # Engines in fp32: a few bits may differ, tokens do not.
    assert ["HTTP, 8 at a time, of mixed strategies / alone", "8", "0"] in first
    second = cells(16, 1)
    assert [(name, requests) for name, requests, _ in second] == [
        (name, "16") for name, *_ in first
    ]
    assert cells(800, 0) == second  # no time: what was counted before
