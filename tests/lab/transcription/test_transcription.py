"""Speech with known texts: errors of transcripts, tables of tools, and equality of two of them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from dsbd_ort.scorers.ngram_files import read_ngrams
from lab.frame.page import ROOT
from lab.peers.catalog import PeerError
from lab.peers.runner_process import RunnerProcess
from lab.transcription.domain import arpa, paragraphs
from lab.transcription.equality import (
    Cases,
    Outcome,
    Part,
    Words,
    compared,
    equality_table,
    outcomes,
)
from lab.transcription.runners.serve import Asked, Job
from lab.transcription.sounds import sounds
from lab.transcription.speech import Spoken, Utterance, write_wav
from lab.transcription.tools import TOOLS, OpenTool
from lab.transcription.word_errors import num_errors, word_error_rate, words_of
from tests.conftest import whisper
from tests.speech.test_transcription import sound

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


def test_a_model_of_a_domain(tmp_path):
    """Probabilities after any history sum to 1, a seen word is likelier; texts are apart."""
    parts = paragraphs()
    assert [len(part) for part in parts[1:]] == [20, 40]
    assert len({text for part in parts for text in part}) == sum(map(len, parts))
    sentences = [words_of(text) for text in parts[0]]
    file = tmp_path / "domain.arpa"
    file.write_text(arpa(sentences), encoding="utf-8")
    model = read_ngrams(file)
    words = {word for words in sentences for word in words} | {"</s>", "<unk>"}
    start = model.history(begins=True)
    for history in (start, model.score(start, "the")[1], model.score((), "palladium")[1]):
        chances = {word: 10 ** model.score(history, word)[0] for word in words}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-4)
    assert max(chances, key=lambda word: chances[word]) == "catalyst"


def test_words_have_no_case_and_no_punctuation():
    for text, words in WORDS:
        assert words_of(text) == words


def test_errors_of_a_transcript_and_their_rate():
    for found, wanted, number in ERRORS:
        assert num_errors(found.split(), wanted.split()) == number
    assert word_error_rate([("A, b", "a b"), ("x y z", "x q")]) == 2 / 4


def test_sounds_are_finite_and_of_the_windows_that_they_say():
    speech = [np.full(16_000 * n, 0.1, np.float32) for n in (3, 5, 4)]
    for name, samples, num_beams in sounds(speech):
        assert samples.dtype == np.float32 and np.isfinite(samples).all(), name
        is_long = len(samples) > 30 * 16_000
        assert is_long == ("between" in name)
        assert num_beams == 1 or not is_long


def test_a_tool_in_a_process_of_its_own(tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros(1600, np.float32))
    job = Job(folder="x", precision="int8", num_threads=1)
    own = {"package": "tests.lab.transcription", "import_from": (ROOT,)}
    process = RunnerProcess(Path(sys.executable), "fake_runner", job, tmp_path / "log", **own)
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


__all__ = ["whisper"]  # a fixture

ONE = [Part(0.0, 2.0, (5, 6), -0.5), Part(2.0, 3.0, (7,), -0.5)]
OTHERS = [  # segments, the difference, that of log-probabilities
    (ONE, "", 0.0),
    ([Part(0.0, 2.0, (5, 6), -0.5005), ONE[1]], "", 0.0005),
    ([Part(0.0, 2.0, (5, 6), None), ONE[1]], "", 0.0),
    (ONE[:1], "1 segments instead of 2", 0.0),
    ([Part(0.0, 2.0, (5, 6), -0.6), ONE[1]], "log-probabilities differ by 0.1", 0.1),
    ([ONE[0], Part(2.0, 3.5, (7,), -0.5)], "segment 1: Part(start=2.0, end=3.5", 0.0),
    ([Part(0.0, 2.0, (5, 9), -0.5), ONE[1]], "segment 0: Part(start=0.0, end=2.0", 0.0),
]


@pytest.mark.parametrize(("found", "words", "error"), OTHERS)
def test_segments_are_compared(found, words, error):
    outcome = compared("kind", "name", found, ONE)
    assert outcome.is_equal == (not words) and outcome.difference.startswith(words)
    assert outcome.logprob_error == pytest.approx(error)


TIMED = ((" a", 0.0, 0.5), (" b", 0.5, 2.0))
OTHER_WORDS: list[tuple[Words | None, str]] = [
    (TIMED, ""),
    (None, ""),  # not asked for
    ((TIMED[0], (" b", 0.5, 1.98)), "segment 0: the word (' b', 0.5, 1.98) instead of (' b', 0.5"),
    ((TIMED[0], (" c", 0.5, 2.0)), "segment 0: the word (' c', 0.5, 2.0) instead of (' b', 0.5"),
    (TIMED[:1], "segment 0: the word None instead of (' b'"),
    ((), "segment 0: the word None instead of (' a'"),
]


@pytest.mark.parametrize(("found", "difference"), OTHER_WORDS)
def test_words_are_compared_where_both_have_them(found, difference):
    wanted = [replace(ONE[0], words=TIMED), ONE[1]]
    outcome = compared("kind", "name", [replace(ONE[0], words=found), ONE[1]], wanted)
    assert outcome.is_equal == (not difference) and outcome.difference.startswith(difference)


def test_words_of_a_model(whisper, tmp_path):
    files = []
    for seed, (name, language) in enumerate(
        (("a", "en"), ("b", "de"), ("c", "fr"), ("long", "en"))
    ):
        samples = sound(0.8 if name != "long" else 1.4, seed)
        write_wav(tmp_path / f"{name}.wav", samples)
        text = Utterance(name=name, language=language, voice="", words_per_minute=0, text="")
        files.append(Spoken(text, tmp_path / f"{name}.wav", len(samples) / 16_000))
    for have_words in (True, False):
        cases = Cases(whisper / "target", whisper / "bundle", files, 1, have_words=have_words)
        of_words = {
            (kind, name): run for kind, name, run in cases.all() if kind.endswith("times of words")
        }
        assert len(of_words) == (2 * len(files) if have_words else 0)
        for asked in (("an utterance, 5 beams", "b"), ("a long file, greedy", "long")):
            if have_words:
                outcome = of_words[f"{asked[0]}, times of words", asked[1]]()
                assert outcome.is_equal, outcome.difference
        cases.close()


class FakeCases:
    def __init__(self) -> None:
        self.run: list[str] = []

    def all(self) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
        for name in ("a", "b", "c"):

            def run(name: str = name) -> Outcome:
                self.run.append(name)
                return compared("kind", name, ONE[: 1 + (name != "b")], ONE)

            yield "kind", name, run


def test_cases_that_were_run_are_not_run_again(tmp_path):
    kept, reported, cases = tmp_path / "kept.jsonl", list[str](), FakeCases()
    assert outcomes(cast(Cases, cases), kept, -1.0, reported.append) == []
    found = outcomes(cast(Cases, cases), kept, 60.0, reported.append)
    assert [each.is_equal for each in found] == [True, False, True]
    again = outcomes(cast(Cases, cases), kept, -1.0, reported.append)
    assert again == found and cases.run == ["a", "b", "c"]
    assert reported == ["kind, b: 1 segments instead of 2"] * 2
    assert equality_table(found)[2:] == ["| kind | 2/3 | 0.0e+00 |"]
