"""Choices on a GPU: times of the same forwards in two settings, and which setting to use.

A choice compares settings of the runtime, ways of padding, or two bundles of the same model with
different export options. Such bundles are recognized by their names, such as twin-1B-fp16 and
twin-1B-fp16-int4.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lab.gpu.forward_times import (
    AS_IT_IS,
    DECODING_ROWS,
    PADDED_TO_40,
    PADDED_TO_64,
    PADDING_SEES_ITSELF,
    PROMPT_ROWS,
    rows_name,
)
from lab.gpu.settings import CUDA_FORM_SUFFIX, INT4_SUFFIX

COLUMNS = ("bundle", "choice", "setting", *map(rows_name, (*DECODING_ROWS, PROMPT_ROWS)), "ratio")
Times = Mapping[str, Mapping[str, float]]
"""Milliseconds of a bundle's forwards, by setting and name of the forward."""

_DECODING = tuple(map(rows_name, DECODING_ROWS))
_NO_DIFFERENCE = 0.02
_NOTHING = "-"


@dataclass(frozen=True)
class Side:
    """One setting of a choice.

    Attributes:
        text: description of the setting.
        setting: setting of the runtime, a key of ``forward_times.SETTINGS``.
        suffix: suffix that is appended to the plain bundle's name.
        forward: the timed forward; empty: all forwards of decoding, with equal weight.
    """

    text: str
    setting: str = AS_IT_IS
    suffix: str = ""
    forward: str = ""


@dataclass(frozen=True)
class Choice:
    """Two settings of one thing; ``default`` is used if the user chooses nothing."""

    name: str
    default: Side
    other: Side


CHOICES = (
    Choice(
        "padding to",
        Side("sizes in steps of 8", forward=PADDED_TO_40),
        Side("powers of two", forward=PADDED_TO_64),
    ),
    Choice(
        "padding rows see",
        Side("column 0 too", forward=PADDED_TO_64),
        Side("themselves alone", forward=PADDING_SEES_ITSELF),
    ),
    Choice(
        "calls",
        Side("recorded"),
        Side("--no-cuda-graphs", setting="--no-cuda-graphs"),
    ),
    Choice("graph", Side("--form portable"), Side("--form cuda", suffix=CUDA_FORM_SUFFIX)),
    Choice("weights", Side("not quantized"), Side("--quantize int4", suffix=INT4_SUFFIX)),
)


@dataclass(frozen=True)
class Compared:
    """A choice that was measured on a bundle.

    Attributes:
        times: times of the default and of the other, by forward.
        ratio: ratio of the other's time to the default's, the geometric mean over the forwards of
            the choice.
    """

    bundle: str
    choice: Choice
    times: tuple[Mapping[str, float], Mapping[str, float]]
    ratio: float

    @property
    def to_take(self) -> Side:
        """The faster side: the default unless the other is faster by 2 % or more."""
        return self.choice.other if self.ratio <= 1 - _NO_DIFFERENCE else self.choice.default


def compared(times_by_bundle: Mapping[str, Times]) -> list[Compared]:
    """Return every choice with both sides measured, bundle by bundle."""
    return [
        comparison
        for bundle, times in times_by_bundle.items()
        for choice in CHOICES
        for comparison in _compared(bundle, choice, times, times_by_bundle)
    ]


def _compared(
    bundle: str, choice: Choice, times: Times, times_by_bundle: Mapping[str, Times]
) -> Iterator[Compared]:
    others = times_by_bundle.get(bundle + choice.other.suffix)
    if others is None or choice.other.setting not in others:
        return
    default, other = times[choice.default.setting], others[choice.other.setting]
    pairs = [
        (default[mine], other[theirs])
        for mine, theirs in _forwards(choice)
        if mine in default and theirs in other
    ]
    if pairs:
        ratio = statistics.geometric_mean(theirs / mine for mine, theirs in pairs)
        yield Compared(bundle, choice, (default, other), ratio)


def _forwards(choice: Choice) -> list[tuple[str, str]]:
    """Return pairs of compared forwards, of the default and of the other."""
    if choice.default.forward:
        return [(choice.default.forward, choice.other.forward)]
    return [(name, name) for name in _DECODING]


def rows(comparisons: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return the cells of ``COLUMNS``: milliseconds of both sides, and their ratio."""
    cells = []
    for each in comparisons:
        sides = (each.choice.default, each.choice.other)
        for side, times, ratio in zip(sides, each.times, ("", f"{each.ratio:.2f}"), strict=True):
            forwards = {rows_name(36): side.forward} if side.forward else {}
            names = [forwards.get(name, "" if forwards else name) for name in COLUMNS[3:-1]]
            shown = [f"{times[name]:.3f}" if name in times else _NOTHING for name in names]
            cells.append((each.bundle, each.choice.name, side.text, *shown, ratio))
    return cells


def lines_to_take(comparisons: Sequence[Compared]) -> list[str]:
    """Return a line for every bundle with the setting to use for each choice."""
    by_bundle: dict[str, list[str]] = {}
    for each in comparisons:
        taken = f"{each.choice.name} {each.to_take.text} ({_reason(each.ratio)})"
        by_bundle.setdefault(each.bundle, []).append(taken)
    return [f"To take for {bundle}: {'; '.join(taken)}." for bundle, taken in by_bundle.items()]


def _reason(ratio: float) -> str:
    if abs(ratio - 1) < _NO_DIFFERENCE:
        return "no difference"
    return f"the other takes {ratio:.2f} of its time" if ratio > 1 else f"{ratio:.2f} of the time"
