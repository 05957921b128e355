"""Read-only folders that take long to make, made once for all processes of a test run."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Return what was made in this process or in another of the run.

    ``make`` writes the folder that it is given, which does not exist, and returns what can be
    pickled, as that folder.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made_once"
    shared.mkdir(exist_ok=True)
    folder, result = shared / name, shared / f"{name}.pickle"
    with FileLock(shared / f"{name}.lock"):
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            result.write_bytes(pickle.dumps(make(folder)))
    made: T = pickle.loads(result.read_bytes())
    return made
