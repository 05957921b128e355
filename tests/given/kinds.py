"""The table of kinds of models that read sounds or pictures, and their bundles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsbd_ort import Pipeline
from scripts import picture_reader_checkpoint, speech_checkpoints
from scripts.picture_checkpoints import PICTURE_MODELS
from scripts.shared_captures import SharedCaptures
from tests.given.picture_kinds import PictureKind, PictureReader
from tests.given.speech_kinds import QwenAsr, SpeechKind

KINDS: dict[str, Any] = {
    "qwen3_asr": QwenAsr,
    **dict.fromkeys(speech_checkpoints.MODELS, SpeechKind),
    **dict.fromkeys(PICTURE_MODELS, PictureKind),
    **dict.fromkeys(picture_reader_checkpoint.KINDS, PictureReader),
}
IN_CI = {"qwen3_asr", "granite_speech", "granite_docling", "paddleocr_vl", "trocr", "donut"}
"""Kinds of which CI exports a model: tiles with levels, a grid with axes of positions."""


def params(kinds: Any = KINDS) -> list[Any]:
    """Return parameters of tests, those that CI leaves out with their mark."""
    return [pytest.param(each, marks=() if each in IN_CI else pytest.mark.long) for each in kinds]


def export_kind(captures: SharedCaptures, name: str, folder: Path) -> Path:
    """Fill a folder with "target", "bundle", and if the kind has one a "draft"."""
    KINDS[name].export(captures, name, folder)
    return folder


@contextlib.contextmanager
def opened(name: str, folder: Path) -> Iterator[Any]:
    """Open the bundle and the checkpoint of a folder."""
    with Pipeline.from_bundle(folder / "bundle", num_threads=1) as pipe:
        yield KINDS[name](name, pipe, folder / "target")
