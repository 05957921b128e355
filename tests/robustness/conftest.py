"""A bundle so small that it can be copied and opened thousands of times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

CONTEXT_LENGTH = 64


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robustness") / "small"
    target, draft = (
        TinyModel(seed=seed, num_layers=1, context_length=CONTEXT_LENGTH) for seed in (0, 1)
    )
    write_tiny_bundle(path, target=target, draft=draft)
    return path


@pytest.fixture(scope="module")
def small_pipe(small_bundle: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(small_bundle, num_threads=1) as pipe:
        yield pipe
