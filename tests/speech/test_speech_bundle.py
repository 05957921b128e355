"""Bundles of speech models: what they say, and what is refused when they are opened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsbd_ort.cli import inspect
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import BundleError
from scripts.speech_checkpoint import TOKENS
from tests.runtime.bundle_edits import edited


def speech_of(data: dict[str, Any], role: str = "target") -> dict[str, Any]:
    speech: dict[str, Any] = data[role]["encoder"]["speech"]
    return speech


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda data: speech_of(data).update(num_frames=50),
        "speech: num_frames is 50, expected 100, the frames of 1 s",
    ),
    (
        lambda data: speech_of(data).update(no_speech_token_id=TOKENS.number),
        f"no_speech_token_id is {TOKENS.number}, expected 0 to {TOKENS.number - 1}",
    ),
    (
        lambda data: speech_of(data).update(word_times=True),
        "speech has word_times True, which this version of dsbd-ort does not know",
    ),
    (
        lambda data: speech_of(data, "draft").update(n_fft=512),
        "read different sources: texts, sound or pictures, or other features of these",
    ),
    (lambda data: data["draft"]["encoder"].update(speech=None), "read different sources"),
    (
        lambda data: speech_of(data).pop("hop_length"),
        r"missing or unknown entries \['hop_length'\]",
    ),
    (lambda data: data["files"].pop("target/alignment.onnx"), "lists no target/alignment.onnx"),
    (
        lambda data: speech_of(data)["alignment"].update(median_filter_width=8),
        "median_filter_width is 8, expected an odd number from 1 to 99",
    ),
    (
        lambda data: speech_of(data).update(alignment_heads=None),
        "alignment_heads is None, expected the layer and head of each",
    ),
]


@pytest.mark.parametrize(("edit", "words"), WRONG)
def test_a_contradiction_is_refused(edit, words, whisper, tmp_path):
    folder = Path(shutil.copytree(whisper / "bundle", tmp_path / "bundle"))
    open_bundle(folder)
    with pytest.raises(BundleError, match=words):
        open_bundle(edited(folder, edit))


def test_inspect_says_what_it_hears(whisper):
    shown = CliRunner().invoke(inspect, [str(whisper / "bundle")], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "1 s of sound, 16 mels" in shown.output
    assert "3 languages: en, de, fr" in shown.output
    assert "times of words, by 2 heads" in shown.output
    shown = CliRunner().invoke(inspect, [str(whisper / "english-bundle"), "--json"])
    speech = json.loads(shown.output)["target"]["encoder"]["speech"]
    assert (speech["languages"], speech["sampling_rate"]) == (None, 16_000)
