"""Tests that damage the tiny bundle take a copy."""

import os
import shutil
from pathlib import Path

import pytest

from dsbd_runtime.bundle_files.bundle import Bundle


@pytest.fixture
def bundle_copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that are synced, under the names that they had at that time."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc: the path of a descriptor is unknown")
    paths: list[Path] = []

    def record(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", record)
    return paths
