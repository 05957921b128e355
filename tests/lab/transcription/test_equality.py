"""How two transcripts compare, and what is kept of cases that were run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest

from lab.transcription.equality import (
    Cases,
    Outcome,
    Part,
    Words,
    compared,
    equality_table,
    outcomes,
)
from lab.transcription.speech import Spoken, Utterance, write_wav
from tests.conftest import whisper
from tests.speech.test_transcription import sound

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


WORDS = ((" a", 0.0, 0.5), (" b", 0.5, 2.0))
OTHER_WORDS: list[tuple[Words | None, str]] = [
    (WORDS, ""),
    (None, ""),  # not asked for
    ((WORDS[0], (" b", 0.5, 1.98)), "segment 0: the word (' b', 0.5, 1.98) instead of (' b', 0.5"),
    ((WORDS[0], (" c", 0.5, 2.0)), "segment 0: the word (' c', 0.5, 2.0) instead of (' b', 0.5"),
    (WORDS[:1], "segment 0: the word None instead of (' b'"),
    ((), "segment 0: the word None instead of (' a'"),
]


@pytest.mark.parametrize(("found", "difference"), OTHER_WORDS)
def test_words_are_compared_where_both_have_them(found, difference):
    wanted = [replace(ONE[0], words=WORDS), ONE[1]]
    outcome = compared("kind", "name", [replace(ONE[0], words=found), ONE[1]], wanted)
    assert outcome.is_equal == (not difference) and outcome.difference.startswith(difference)


def test_words_of_a_model(whisper, tmp_path):
    """Those of transformers, on demand."""
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
    """Three cases, of which the second differs."""

    def __init__(self) -> None:
        self.run: list[str] = []

    def all(self) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
        """Yield them."""
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
