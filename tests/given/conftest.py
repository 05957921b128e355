"""Fixtures: a tiny Qwen3-ASR with a draft of its kind, exported once, and opened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dsbd_ort import Pipeline
from tests.made_once import made_once

if TYPE_CHECKING:
    from scripts.shared_captures import SharedCaptures
    from tests.given.sounds import Reference


@pytest.fixture(scope="session")
def given_pair(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    from tests.given.sounds import export_pair

    return made_once(tmp_path_factory, "qwen3-asr", partial(export_pair, captures))


@pytest.fixture(scope="module")
def given_pipe(given_pair: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(given_pair / "bundle", num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def reference(given_pair: Path) -> Reference:
    from tests.given.sounds import Reference

    return Reference.of(given_pair / "target")
