"""The tables of a comparison: what a source takes, a further token, all of a translation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsbd_ort.benchmark.bootstrap import bootstrap, spread
from lab.frame.page import ratio_cell, spread_cell
from lab.peers.catalog import OURS
from lab.translation.comparison import DRAFTED, FIRST_TOKEN, GREEDY, LONG_SOURCE, SEARCH, WHOLE
from scripts.document_sections import table

COLUMNS = (
    *("tool", "precision", "what it did", "source and first token, ms", "a further token, ms"),
    *("whole, ms", "ours / theirs", "long source, ms", "long: ours / theirs"),
    *("tokens a call", "same tokens", "peak memory, MB"),
)
BAR_COLUMNS = ("ours over CTranslate2", "precision", "aimed at", "measured")
AIMS = {"fp32": 1.3, "int8": 1.0}
UNDRAFTED = {drafted: name for name, drafted in DRAFTED.items()}
_REASON_LENGTH = 200  # characters of an error in the table

Key = tuple[str, str, str]  # tool, precision, run


@dataclass(frozen=True)
class Timed:
    """One request of a report.

    Attributes:
        work: what was asked; ``place``: which of its sources.
        token_ids: the new ones, with the end.
    """

    work: str
    place: int
    round: int
    seconds: float
    token_ids: tuple[int, ...]
    num_iterations: int | None
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Return new tokens per second."""
        return len(self.token_ids) / self.seconds


class Timings:
    """The requests of a report by row, and pairs of them."""

    def __init__(self, report: dict[str, Any]) -> None:
        """Take a report as JSON gives it."""
        places = _places([prompt["work"] for prompt in report["prompts"]])
        self._by_row: dict[Key, list[Timed]] = {}
        for each in report["requests"]:
            key = each["peer"], each["precision"], each["run"]
            self._by_row.setdefault(key, []).append(
                Timed(
                    work=each["work"],
                    place=places[each["prompt_index"]],
                    round=each["round"],
                    seconds=each["seconds"],
                    token_ids=tuple(each["token_ids"]),
                    num_iterations=each["num_iterations"],
                    peak_bytes=each["peak_bytes"],
                )
            )

    def of(self, key: Key, work: str | None = None) -> list[Timed]:
        """Return the requests of a row, of one kind of work or of all."""
        return [each for each in self._by_row.get(key, []) if work in (None, each.work)]

    def pairs(
        self, key: Key, work: str, other: Key, other_work: str | None = None
    ) -> list[tuple[Timed, Timed]]:
        """Return the requests of two rows, or kinds of work, with the same source and round."""
        by_place = {(each.place, each.round): each for each in self.of(other, other_work or work)}
        found = ((each, by_place.get((each.place, each.round))) for each in self.of(key, work))
        return [(one, two) for one, two in found if two is not None]


def _places(works: Iterable[str]) -> list[int]:
    """Return of every prompt which one of its kind of work it is."""
    counts: dict[str, int] = {}
    places = []
    for work in works:
        places.append(counts.setdefault(work, 0))
        counts[work] += 1
    return places


def tables_of(report: dict[str, Any]) -> list[str]:
    """Return the lines of the rows and of the aims of a report."""
    timings = Timings(report)
    lines = table(COLUMNS, [_cells(row, timings) for row in report["rows"] if _is_first(row)])
    bars = [cells for precision in AIMS for cells in _bars(timings, precision)]
    return [*lines, "", *table(BAR_COLUMNS, bars)] if bars else lines


def _is_first(row: dict[str, Any]) -> bool:
    return bool(row["work"] == FIRST_TOKEN)  # a row a kind of work: they are one here


def _cells(row: dict[str, Any], timings: Timings) -> tuple[str, ...]:
    key = row["peer"], row["precision"], row["run"]
    if row["reason"]:
        reason = " ".join(row["reason"].split()).replace("|", "\\|")[:_REASON_LENGTH]
        return (*key, reason, *("" for _ in COLUMNS[4:]))
    return (
        *key,
        _milliseconds(timings, key, FIRST_TOKEN),
        _further_token(timings, key),
        _milliseconds(timings, key, WHOLE),
        _ratio(timings, key, WHOLE),
        _milliseconds(timings, key, LONG_SOURCE),
        _ratio(timings, key, LONG_SOURCE),
        _tokens_a_call(timings, key),
        _same_tokens(timings, key),
        f"{max(each.peak_bytes for each in timings.of(key)) / 1e6:.0f}",
    )


def _milliseconds(timings: Timings, key: Key, work: str) -> str:
    return spread_cell(spread([1e3 * each.seconds for each in timings.of(key, work)]))


def _further_token(timings: Timings, key: Key) -> str:
    """Return what a token behind the first takes: the whole less the first, by their number."""
    pairs = timings.pairs(key, WHOLE, key, FIRST_TOKEN)
    each = [
        1e3 * (whole.seconds - first.seconds) / (len(whole.token_ids) - 1)
        for whole, first in pairs
        if len(whole.token_ids) > 1
    ]
    return spread_cell(spread(each)) if each else ""


def _ratio(timings: Timings, key: Key, work: str) -> str:
    """Return our tokens per second over theirs; of a drafted row of ours over those without."""
    tool, precision, run = key
    if tool != OURS:
        return _ratio_cell(timings, (OURS, precision, run), key, work)
    if run not in UNDRAFTED:
        return ""
    cell = _ratio_cell(timings, key, (OURS, precision, UNDRAFTED[run]), work)
    return f"{cell} times without" if cell else ""


def _ratio_cell(timings: Timings, key: Key, other: Key, work: str) -> str:
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in timings.pairs(key, work, other)]
    return ratio_cell(bootstrap(ratios, "median")) if ratios else ""


def _tokens_a_call(timings: Timings, key: Key) -> str:
    asked = timings.of(key, WHOLE)
    calls = [each.num_iterations for each in asked]
    if None in calls:
        return ""
    return f"{sum(len(each.token_ids) for each in asked) / sum(filter(None, calls)):.2f}"


def _same_tokens(timings: Timings, key: Key) -> str:
    _, precision, run = key
    ours = OURS, precision, UNDRAFTED.get(run, run)
    if key == ours:
        return ""
    pairs = [pair for work in (WHOLE, LONG_SOURCE) for pair in timings.pairs(key, work, ours)]
    return f"{sum(a.token_ids == b.token_ids for a, b in pairs)}/{len(pairs)}"


def _bars(timings: Timings, precision: str) -> list[tuple[str, ...]]:
    """Return the aims of a precision, and what was measured; none without CTranslate2."""
    found: list[tuple[str, ...]] = []
    for run in (GREEDY, SEARCH):
        for ours in (run, DRAFTED[run]):
            cell = _ratio_cell(
                timings, (OURS, precision, ours), ("ctranslate2", precision, run), WHOLE
            )
            if cell:
                found.append((ours, precision, f"{AIMS[precision]:g}", cell))
    return found
