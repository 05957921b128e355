"""Numbers on the command line: all are bounded, and none is NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import click

from dsbd_ort.number_checks import MOST, MOST_BYTES, MOST_SECONDS


class FiniteRange(click.FloatRange):
    """click's FloatRange, which lets NaN through: no comparison with it is true."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse the option's text."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class IntList(click.ParamType[int | tuple[int, ...]]):
    """One whole number, or several with commas between: 4 or 4,4,2."""

    name = "INT[,INT...]"

    def __init__(self, least: int, most: int) -> None:
        self._each = click.IntRange(least, most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        """Parse the option's text."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a whole number or a list such as 4,4,2", param, ctx)
        numbers = tuple(self._each.convert(number, param, ctx) for number in numbers)
        return numbers[0] if len(numbers) == 1 else numbers


COUNT = click.IntRange(1, MOST)
COUNT_OR_NONE = click.IntRange(0, MOST)
BYTES = click.IntRange(1, MOST_BYTES)
SECONDS = FiniteRange(0, MOST_SECONDS, min_open=True)
SECONDS_OR_NONE = FiniteRange(0, MOST_SECONDS)
WHOLE_SECONDS = click.IntRange(1, MOST_SECONDS)
TOLERANCE = FiniteRange(max=1e6)
