"""What the load scripts compute, and that they run: seconds on a tiny bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_runtime.bundle import Bundle
from http_load.mixed_load import Outcomes
from http_load.server_process import MemorySamples, sampled_memory

ROOT = Path(__file__).parents[2]


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
    ("script", "document", "section", "options"),
    [
        ("soak_server", "serving.md", "soak", ["--minutes", "0.03", "--clients", "2"]),
        (
            "measure_serving",
            "performance.md",
            "serving",
            ["--rounds", "1", "--requests", "2", "--max-new-tokens", "4"],
        ),
        ("measure_streams", "serving.md", "streams", ["--max-new-tokens", "4"]),
        (
            "measure_invariance",
            "performance.md",
            "invariance",
            ["--requests", "8", "--num-beams", "2", "--max-new-tokens", "4"],
        ),
        (
            "measure_retrieval",
            "performance.md",
            "retrieval memory",
            ["--num-ids", "2000", "--width", "4", "--num-prompts", "2"],
        ),
    ],
)
def test_a_script_runs_and_writes_its_section(
    tmp_path: Path,
    tiny_bundle: Bundle,
    script: str,
    document: str,
    section: str,
    options: list[str],
) -> None:
    assert f"<!-- {section} -->" in (ROOT / "docs" / document).read_text()
    copy = tmp_path / document
    copy.write_text(f"before\n<!-- {section} -->\nold\n<!-- end of {section} -->\nafter\n")
    command = [ROOT / "scripts" / script, tiny_bundle.path, "--document", copy, "--threads", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    head, text, tail = copy.read_text().partition(done.stdout.strip())
    assert (head, tail) == (
        f"before\n<!-- {section} -->\n",
        f"\n<!-- end of {section} -->\nafter\n",
    )
    assert text.count("|") > 20
    if section == "invariance":  # engines in fp32: a few bits may differ, tokens do not
        (cells,) = (line.split(" | ")[2:4] for line in text.splitlines() if "| HTTP, 8 at" in line)
        assert cells == ["8", "0"]
