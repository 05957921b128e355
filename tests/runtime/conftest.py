"""Tests that damage the tiny bundle take a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsbd_runtime.bundle import Bundle


@pytest.fixture
def bundle_copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
