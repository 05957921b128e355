"""The exactness tests can fail: six deliberate faults in copies of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
REJECTION = "test_rejection.py::test_one_layer_has_the_law_of_sequential_draws"
LAW = "test_exactness.py::test_final_beam_sets_follow_the_exact_law"
EQUALITY = "test_exactness.py::test_fixed_width_dsbd_equals_beam_sample_token_for_token"


class Fault(NamedTuple):
    """A piece of a file, what the fault makes of it, and the exactness test that must fail."""

    file: str
    right: str
    wrong: str
    caught_by: str


FAULTS = {
    "q not restricted without replacement": Fault(
        "rejection_coupling.py",
        "if not self._replacement:\n                q[s]",
        "if False:\n                q[s]",
        REJECTION,
    ),
    "refill beyond the layer's width on failure": Fault(
        "rejection_coupling.py",
        "self._fill(outputs, residual, p, num_draws), False",
        "self._fill(outputs, residual, p, num_draws + 1), False",
        REJECTION,
    ),
    "residual not reset after acceptance": Fault(
        "rejection_coupling.py",
        "residual = self._without(p, outputs)\n            else:",
        "residual[here] = 0.0\n                residual = residual / residual.sum()\n"
        "            else:",
        REJECTION,
    ),
    "a drawn candidate dropped": Fault(
        "rejection_coupling.py",
        "for s in layer.drawn.tolist():",
        "for s in [s for s in layer.drawn.tolist() if q[s] > 0.2]:",
        REJECTION,
    ),
    "noise that repeats across steps for an absorbing beam": Fault(
        "noise.py", "keys ^ NOISE_DOMAIN, depth", "keys ^ NOISE_DOMAIN, 0", LAW
    ),
    "noise keyed by row instead of path": Fault(
        "forest.py",
        "keys = self.path_keys[joint.nodes]",
        "keys = (joint.nodes + 1).view(np.uint64)",
        EQUALITY,
    ),
}


def outcome_with(fault: Fault | None, test: str, folder: Path) -> int:
    """Run one test against a copy of the package; return pytest's exit code."""
    for package in ("dsbd_ort", "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "conftest.py")
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    if fault:
        file = folder / "dsbd_ort" / "decoding" / fault.file
        source = file.read_text()
        assert source.count(fault.right) == 1, "the code has changed: write the fault anew"
        file.write_text(source.replace(fault.right, fault.wrong))
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = slow\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", f"tests/decoding/{test}"],
        cwd=folder,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name, tmp_path):
    assert outcome_with(FAULTS[name], FAULTS[name].caught_by, tmp_path) == 1


@pytest.mark.slow
@pytest.mark.parametrize("test", [REJECTION, LAW, EQUALITY])
def test_without_a_fault_the_copy_passes(test, tmp_path):
    assert outcome_with(None, test, tmp_path) == 0
