"""Fixtures: a tiny Qwen3-ASR with a draft of its kind, exported once, and opened."""

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
    from tests.given.pictures import PictureReference
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


@pytest.fixture(scope="session")
def picture_model(
    tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures
) -> Callable[[str], Path]:
    """A function that returns the folder of a kind, with "target" and "bundle"."""
    from tests.given.shown_pictures import picture_bundle

    return partial(picture_bundle, captures, tmp_path_factory)


@pytest.fixture(scope="session")
def picture_reference(picture_model: Callable[[str], Path]) -> Callable[[str], PictureReference]:
    from tests.given.pictures import PictureReference

    @functools.cache
    def opened(name: str) -> PictureReference:
        return PictureReference.of(name, picture_model(name) / "target")

    return opened


@pytest.fixture(scope="session")
def picture_pipe(picture_model: Callable[[str], Path]) -> Iterator[Callable[[str], Pipeline]]:
    with contextlib.ExitStack() as opened:

        @functools.cache
        def open_pipe(name: str) -> Pipeline:
            bundle = picture_model(name) / "bundle"
            return opened.enter_context(Pipeline.from_bundle(bundle, num_threads=1))

        yield open_pipe


@pytest.fixture(scope="session")
def speech_model(
    tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures
) -> Callable[[str], Path]:
    """Return a function that returns the folder of a speech model by its ``model_type``."""
    from tests.given.speech_kinds import export_speech_model

    def folder_of(name: str) -> Path:
        make = partial(export_speech_model, captures, name)
        return made_once(tmp_path_factory, f"speech-{name}", make)

    return folder_of
