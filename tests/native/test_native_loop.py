"""The native loop returns what Python's loop returns, to the last bit: whole requests on tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PORTABLE = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}
"""With AVX-512 numpy has an exp and a log of its own for float64, which round otherwise."""


def check_requests(program: Path, folder: Path, number: int, seed: int) -> list[dict]:
    """Hold native results against Python's; return Python's."""
    arguments = [str(folder), str(number), str(seed)]
    writer = [sys.executable, "-W", "ignore", "-m", "tests.native.table_requests", *arguments]
    subprocess.run(writer, check=True, cwd=ROOT, env={**os.environ, **PORTABLE})
    printed = subprocess.run(
        [program, folder / "cases.json"], check=True, capture_output=True, text=True
    ).stdout
    found, expected = json.loads(printed), json.loads((folder / "expected.json").read_text())
    assert found["refused"] == expected["refused"]
    for number, (ours, theirs) in enumerate(zip(found["cases"], expected["cases"], strict=True)):
        for outcome in (*ours.get("outcomes", []), *theirs["outcomes"]):
            outcome["error"] = "error" in outcome  # its text names options as each library does
        assert ours == theirs, f"case {number} of {folder}"
    return [outcome for case in expected["cases"] for outcome in case["outcomes"]]


def test_whole_requests_on_tables(native_build, tmp_path):
    outcomes = check_requests(native_build / "tests/loop_test", tmp_path, 80, 5)
    assert sum(not outcome["error"] for outcome in outcomes) >= 30, "most are refused: draw others"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_many_whole_requests_on_tables(native_build, tmp_path, seed):
    check_requests(native_build / "tests/loop_test", tmp_path, 1000, seed)
