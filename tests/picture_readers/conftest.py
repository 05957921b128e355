"""Fixtures: a tiny TrOCR with a draft of its kind, and a tiny Donut, exported once, and opened."""

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


@pytest.fixture(scope="session")
def trocr_folder(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    from tests.given.kinds import export_kind

    return made_once(tmp_path_factory, "trocr", partial(export_kind, captures, "trocr"))


@pytest.fixture(scope="session")
def donut_folder(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    from tests.given.kinds import export_kind

    return made_once(tmp_path_factory, "donut", partial(export_kind, captures, "donut"))


@pytest.fixture(scope="module")
def trocr(trocr_folder: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(trocr_folder / "bundle", num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def donut(donut_folder: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(donut_folder / "bundle", num_threads=1) as opened:
        yield opened
