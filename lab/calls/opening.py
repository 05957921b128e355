"""Time and memory of opening a bundle in a separate process, with files in memory or on disk.

python -m lab.calls.opening BUNDLE THREADS [ENGINE_CACHE] opens it and prints both as JSON.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dsbd_ort import Pipeline
from scripts.machine import memory_of

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Opening:
    """One opening; ``own_bytes``: memory that the process does not share with other processes."""

    seconds: float
    own_bytes: int


def time_opening(
    bundle: Path, threads: int, engine_cache: Path | None, *, is_cold: bool
) -> Opening:
    """Open ``bundle`` in a new process; ``is_cold``: its files are not in the page cache."""
    if is_cold:
        for folder in (bundle, engine_cache):
            if folder is not None:
                forget(folder)
    arguments = [str(bundle), str(threads)] + ([str(engine_cache)] if engine_cache else [])
    done = subprocess.run(
        [sys.executable, "-m", "lab.calls.opening", *arguments],
        cwd=_ROOT, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    return Opening(**json.loads(done.stdout))


def forget(folder: Path) -> None:
    """Remove all files of ``folder`` from the page cache, after writing them to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _open(bundle: str, threads: str, engine_cache: str | None = None) -> Opening:
    began = time.perf_counter()
    with Pipeline.from_bundle(bundle, num_threads=int(threads), engine_cache=engine_cache):
        seconds = time.perf_counter() - began
        return Opening(seconds, memory_of()["RssAnon"])


if __name__ == "__main__":
    print(json.dumps(vars(_open(*sys.argv[1:]))))
