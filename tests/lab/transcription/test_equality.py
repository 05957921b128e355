"""How two transcripts compare, and what is kept of cases that were run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from lab.transcription.equality import Cases, Outcome, Part, compared, equality_table, outcomes

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
def test_segments_are_compared(found: list[Part], words: str, error: float) -> None:
    outcome = compared("kind", "name", found, ONE)
    assert outcome.is_equal == (not words) and outcome.difference.startswith(words)
    assert outcome.logprob_error == pytest.approx(error)


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


def test_cases_that_were_run_are_not_run_again(tmp_path: Path) -> None:
    kept, reported, cases = tmp_path / "kept.jsonl", list[str](), FakeCases()
    assert outcomes(cast(Cases, cases), kept, -1.0, reported.append) == []
    found = outcomes(cast(Cases, cases), kept, 60.0, reported.append)
    assert [each.is_equal for each in found] == [True, False, True]
    again = outcomes(cast(Cases, cases), kept, -1.0, reported.append)
    assert again == found and cases.run == ["a", "b", "c"]
    assert reported == ["kind, b: 1 segments instead of 2"] * 2
    assert equality_table(found)[2:] == ["| kind | 2/3 | 0.0e+00 |"]
