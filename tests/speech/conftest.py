"""A tiny random Whisper and its bundles, made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import export_bundle
from dsbd_ort import Pipeline
from scripts.shared_captures import SharedCaptures
from scripts.speech_checkpoint import write_whisper
from tests.made_once import made_once


@pytest.fixture(scope="session")
def whisper(captures: SharedCaptures, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints "target" and "english", and their bundles.

    "bundle" has a draft, "english-bundle" none.
    """

    def make(folder: Path) -> Path:
        target = write_whisper(folder / "target")
        draft = write_whisper(folder / "draft", decoder_layers=1, encoder_layers=1)
        english = write_whisper(folder / "english", multilingual=False)
        exports = {"bundle": (target, draft), "english-bundle": (english, None)}
        for name, (source, other) in exports.items():
            config = ExportConfig(
                target=str(source),
                draft=None if other is None else str(other),
                output=folder / name,
            )
            export_bundle(config, report=lambda _: None, source_of=captures)
        return folder

    return made_once(tmp_path_factory, "whisper", make)


@pytest.fixture(scope="session")
def speech_bundle(whisper: Path) -> Path:
    return whisper / "bundle"


@pytest.fixture(scope="session")
def speech_pipe(whisper: Path) -> Iterator[Pipeline]:
    with Pipeline.from_bundle(whisper / "bundle", num_threads=1) as pipe:
        yield pipe
