"""Fixtures: tiny models that read sounds or pictures, exported once, and opened."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dsbd_ort import Pipeline
from tests.made_once import made_once

if TYPE_CHECKING:
    from scripts.shared_captures import SharedCaptures


@pytest.fixture(scope="session")
def media_folder(
    tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures
) -> Callable[[str], Path]:
    """A function that returns the folder of a kind, with "target" and "bundle"."""
    from tests.given.kinds import export_kind

    return lambda name: made_once(tmp_path_factory, name, partial(export_kind, captures, name))


@pytest.fixture(scope="session")
def media_pipe(media_folder: Callable[[str], Path]) -> Iterator[Callable[[str], Pipeline]]:
    """A function that opens the bundle of a kind."""
    with contextlib.ExitStack() as opened:

        @functools.cache
        def open_pipe(name: str) -> Pipeline:
            bundle = media_folder(name) / "bundle"
            return opened.enter_context(Pipeline.from_bundle(bundle, num_threads=1))

        yield open_pipe


@pytest.fixture(scope="session")
def given_pair(media_folder: Callable[[str], Path]) -> Path:
    """Qwen3-ASR with a draft of its kind."""
    return media_folder("qwen3_asr")


@pytest.fixture(scope="module")
def given_pipe(given_pair: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(given_pair / "bundle", num_threads=1) as opened:
        yield opened
