"""What takes long to make and is only read: made once for all processes of a test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]
) -> Path:
    """Return a folder that was made in this process or in another of the run.

    ``make`` writes the folder that it is given and returns it.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made_once"
    shared.mkdir(exist_ok=True)
    folder = shared / name
    with FileLock(shared / f"{name}.lock"):
        if not folder.exists():
            make(shared / f"{name}.unfinished").rename(folder)
    return folder
