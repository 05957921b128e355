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


def _exported(kind: str, factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    from tests.picture_readers.pages import export_reader

    changes = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}
    changes |= {"no_repeat_ngram_size": 3} if kind == "trocr" else {"forced_eos_token_id": 1}
    return made_once(factory, kind, partial(export_reader, kind, captures, **changes))


@pytest.fixture(scope="session")
def trocr_folder(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    return _exported("trocr", tmp_path_factory, captures)


@pytest.fixture(scope="session")
def donut_folder(tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures) -> Path:
    return _exported("donut", tmp_path_factory, captures)


@pytest.fixture(scope="module")
def trocr(trocr_folder: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(trocr_folder / "bundle", num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def donut(donut_folder: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(donut_folder / "bundle", num_threads=1) as opened:
        yield opened
