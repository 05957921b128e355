"""A tiny bundle, written once a session; tests that damage it take a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsbd_runtime.bundle import Bundle, open_bundle
from tests.runtime.tiny_graph import write_tiny_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    write_tiny_bundle(path)
    return open_bundle(path)


@pytest.fixture
def bundle_copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
