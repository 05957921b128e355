"""Speech with known texts, errors of transcripts, and what tables say of tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dsbd_ort.speech.languages import LANGUAGE_NAMES
from lab.frame.page import ROOT
from lab.peers.catalog import PeerError
from lab.peers.runner_process import RunnerProcess
from lab.transcription.comparison import COLUMNS, Transcribed, Work, lines_of, transcribed
from lab.transcription.runners.serve import Asked, Job, read_samples
from lab.transcription.sounds import sounds
from lab.transcription.speech import Spoken, utterances, write_wav
from lab.transcription.tools import TOOLS, OpenTool, ct2_folder
from lab.transcription.word_errors import num_errors, word_error_rate, words_of

WORDS = [  # text, its words
    ("Don't stop, well-known Mr. X!", ["dont", "stop", "well", "known", "mr", "x"]),
    ("  «Où est-il ?»  ", ["où", "est", "il"]),
    ("", []),
]
ERRORS = [  # transcript, text, errors
    ("a b c", "a b c", 0),
    ("a x c", "a b c", 1),
    ("a c", "a b c", 1),
    ("a b b c", "a b c", 1),
    ("", "a b c", 3),
    ("b c d", "a b c", 2),
]


@pytest.mark.parametrize(("text", "words"), WORDS)
def test_words_have_no_case_and_no_punctuation(text, words):
    assert words_of(text) == words


@pytest.mark.parametrize(("found", "wanted", "number"), ERRORS)
def test_errors_of_a_transcript(found, wanted, number):
    assert num_errors(found.split(), wanted.split()) == number


def test_the_rate_is_that_of_all_words():
    assert word_error_rate([("A, b", "a b"), ("x y z", "x q")]) == 2 / 4


def test_texts_are_as_every_model_writes_them():
    texts = utterances()
    assert len({each.name for each in texts}) == len(texts) >= 22
    assert [each.is_long for each in texts].count(True) == 2
    assert len({each.voice for each in texts}) > 15
    for each in texts:
        assert each.language in LANGUAGE_NAMES
        assert not any(letter.isdigit() for letter in each.text)


def test_samples_of_a_file(tmp_path):
    samples = np.array([0.0, 0.5, -0.5, 1.5], np.float32)
    write_wav(tmp_path / "a.wav", samples)
    found = read_samples(str(tmp_path / "a.wav"))
    np.testing.assert_allclose(found, [0.0, 0.5, -0.5, 1.0], atol=1e-4)


def test_sounds_are_finite_and_of_the_windows_that_they_say():
    speech = [np.full(16_000 * n, 0.1, np.float32) for n in (3, 5, 4)]
    for name, samples, num_beams in sounds(speech):
        assert samples.dtype == np.float32 and np.isfinite(samples).all(), name
        is_long = len(samples) > 30 * 16_000
        assert is_long == ("between" in name)
        assert num_beams == 1 or not is_long


def test_a_folder_for_faster_whisper(tmp_path):
    given, checkpoint = tmp_path / "given", tmp_path / "checkpoint"
    given.mkdir()
    checkpoint.mkdir()
    (given / "model.bin").write_bytes(b"weights")
    content = {
        "model": {"vocab": {"b": 1, "a": 0}},
        "added_tokens": [{"id": 2, "content": "<|end|>"}],
    }
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    folder = ct2_folder(given, checkpoint, tmp_path / "work")
    assert sorted(file.name for file in folder.iterdir()) == [
        "model.bin",
        "tokenizer.json",
        "vocabulary.json",
    ]
    assert json.loads((folder / "vocabulary.json").read_text()) == ["a", "b", "<|end|>"]
    assert (folder / "model.bin").read_bytes() == b"weights"


def test_a_tool_in_a_process_of_its_own(tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros(1600, np.float32))
    job = Job(folder="x", precision="int8", num_threads=1)
    process = RunnerProcess(
        Path(sys.executable),
        "fake_runner",
        job,
        tmp_path / "log",
        package="tests.lab.transcription",
        import_from=(ROOT,),
    )
    with process:
        tool = OpenTool(TOOLS[1], process)
        assert (tool.version, tool.settings) == ("1.0", "int8")
        path = str(tmp_path / "a.wav")
        found = tool.transcribe(Asked(path=path, language="en", num_beams=5, timestamps=False))
        assert found.pop("peak_bytes") > 10**6
        assert found == {
            "text": "1600 samples",
            "num_tokens": 5,
            "seconds": 3.0,
            "parts": {"features": 0.0, "encoder": 1.0},
        }
        with pytest.raises(PeerError, match="ValueError: no language xx"):
            tool.transcribe(Asked(path=path, language="xx", num_beams=5, timestamps=False))


class FakeTool:
    """A tool that says its name, or fails."""

    def __init__(self, number: int, seconds: float) -> None:
        self.tool = TOOLS[number]
        self.version, self.settings = "1.0", ""
        self.seconds = seconds
        self.asked: list[str] = []

    def transcribe(self, asked: Asked) -> dict[str, Any]:
        """Return the text without its end."""
        self.asked.append(Path(asked.path).stem)
        if self.seconds < 0:
            raise PeerError("crashed")
        parts = {"features": 0.01, "encoder": self.seconds / 2}
        text = "a text of five words"
        return {
            "text": text,
            "num_tokens": 7,
            "seconds": self.seconds,
            "parts": parts,
            "peak_bytes": 10**9,
        }


def test_the_table_of_a_work():
    ours, theirs, failing = FakeTool(0, 1.0), FakeTool(2, 1.5), FakeTool(4, -1.0)
    tools = cast(list[OpenTool], [ours, theirs, failing])
    text = utterances()[0]
    spoken = [Spoken(text, Path(f"{name}.wav"), 2.0) for name in ("a", "b")]
    work = Work(title="Short", spoken=spoken, num_beams=5, timestamps=False, rounds=2)
    reported: list[str] = []
    found: list[Transcribed] = list(transcribed(work, tools, reported.append))
    assert ours.asked == ["b", "a", "b", "a", "b"] == theirs.asked and failing.asked == ["b"]
    assert reported == ["transformers, fp32, en-01: crashed"] and len(found) == 8
    lines = list(lines_of(work, tools, found))
    assert lines[0] == "### Short, 5 beams"
    rows = [dict(zip(COLUMNS, line.strip("| ").split(" | "), strict=True)) for line in lines[6:]]
    assert [row["tool"] for row in rows] == ["dsbd-ort 1.0", "faster-whisper 1.0"]
    assert rows[1]["ms per second of audio"] == "750.0 (750.0 to 750.0)"
    assert (rows[1]["encoder"], rows[1]["decoder"]) == ("375.0", "370.0")
    assert rows[1]["ours faster by"] == "**1.50** (1.50 to 1.50)"
    assert (rows[1]["tokens"], rows[1]["peak MB"]) == ("14", "1000")
