"""Ranges of numbers that JSON schemas describe, exact to the last digit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dsbd_ort.constraints.digit_patterns import MOST_DIGITS
from dsbd_ort.decoding.errors import ConstraintError


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers between bounds, None being no bound.

    Attributes:
        low, high: the bounds.
        has_low, has_high: whether they are in the range.
        is_integer: whether only integers are.
        factor: of which they are multiples, None for any.
    """

    low: Fraction | None = None
    high: Fraction | None = None
    has_low: bool = True
    has_high: bool = True
    is_integer: bool = False
    factor: Fraction | None = None

    @staticmethod
    def of(schema: Mapping[str, Any], *, is_integer: bool) -> NumberRange:
        """Return the range that the keywords of a schema describe."""
        found = NumberRange(is_integer=is_integer)
        low, high = _number(schema, "minimum"), _number(schema, "maximum")
        found = found & NumberRange(low=low, high=high)
        for key, bound in (("exclusiveMinimum", low), ("exclusiveMaximum", high)):
            value = schema.get(key)
            exclusive = (
                (bound if value else None) if isinstance(value, bool) else _number(schema, key)
            )
            if exclusive is not None and key == "exclusiveMinimum":
                found = found & NumberRange(low=exclusive, has_low=False)
            elif exclusive is not None:
                found = found & NumberRange(high=exclusive, has_high=False)
        return found & NumberRange(factor=_number(schema, "multipleOf"))

    def __and__(self, other: NumberRange) -> NumberRange:
        """Return the numbers that are in both."""
        lows = [(r.low, not r.has_low) for r in (self, other) if r.low is not None]
        highs = [(r.high, r.has_high) for r in (self, other) if r.high is not None]
        low, is_open = max(lows, default=(None, False))
        high, has_high = min(highs, default=(None, True))
        factors = [abs(r.factor) for r in (self, other) if r.factor is not None]
        return NumberRange(
            low=low,
            high=high,
            has_low=not is_open,
            has_high=has_high,
            is_integer=self.is_integer or other.is_integer,
            factor=_common_multiple(*factors) if len(factors) > 1 else next(iter(factors), None),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no number is in it, multiples left aside."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (
            self.low == self.high and not (self.has_low and self.has_high)
        )

    def integers(self) -> NumberRange:
        """Return the range of its integers, both bounds in it."""
        low, high = self.low, self.high
        if low is not None:
            low = Fraction(math.ceil(low) if self.has_low else math.floor(low) + 1)
        if high is not None:
            high = Fraction(math.floor(high) if self.has_high else math.ceil(high) - 1)
        return NumberRange(low=low, high=high, is_integer=True, factor=self.factor)

    def schema(self) -> dict[str, Any]:
        """Return a schema of the range."""
        bounds = {
            ("minimum" if self.has_low else "exclusiveMinimum"): self.low,
            ("maximum" if self.has_high else "exclusiveMaximum"): self.high,
            "multipleOf": self.factor,
        }
        return {"type": "integer" if self.is_integer else "number"} | {
            key: int(value) if value.denominator == 1 else float(value)
            for key, value in bounds.items()
            if value is not None
        }

    def __contains__(self, value: object) -> bool:
        """Return whether a value of JSON is one of these numbers."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        number = Fraction(value)
        both = self & NumberRange(low=number, high=number)
        return (
            not both.is_empty
            and (not self.is_integer or number.denominator == 1)
            and (not self.factor or (number / self.factor).denominator == 1)
        )


def _common_multiple(first: Fraction, second: Fraction) -> Fraction:
    over = math.lcm(first.denominator, second.denominator)
    return Fraction(math.lcm(int(first * over), int(second * over)), over)


def _number(schema: Mapping[str, Any], key: str) -> Fraction | None:
    """Return the number of a keyword, exactly as its decimal digits say."""
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConstraintError(f"the JSON schema has {key} {value!r}; expected a number")
    if abs(value) >= 10**MOST_DIGITS:
        raise ConstraintError(
            f"the JSON schema has a {key} of more than {MOST_DIGITS} digits; leave it out"
        )
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))
