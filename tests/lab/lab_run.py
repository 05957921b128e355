"""``lab/run`` in a process, as one calls it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"


def lab_run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "lab" / "run", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
