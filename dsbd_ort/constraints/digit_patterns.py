"""Regular expressions of the decimal spellings of numbers between bounds, of any size."""

from __future__ import annotations

import math

MOST_DIGITS = 400
"""Of a bound; a float has 309."""
_MOST_SUFFIXES = 1000
_MOST_REMAINDERS = 20_000  # times digits


def integers_between(low: int | None, high: int | None) -> str:
    """Return the pattern of the integers from ``low`` to ``high``, such as "[1-9]|1[0-7]".

    None is no bound. The range must not be empty.
    """
    patterns = []
    if high is None or high >= 0:
        patterns += _naturals(max(low or 0, 0), high)
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        patterns += [f"-{each}" for each in _naturals(least, None if low is None else -low)]
    return "|".join(patterns)


def numbers_between(low: int | None, high: int | None, *, has_low: bool, has_high: bool) -> str:
    """Return the pattern of the numbers between two integers, without exponents.

    None is no bound; ``has_low`` and ``has_high`` say whether the bounds are in the range, which
    must not be empty.
    """
    patterns = []
    if high is None or high > 0 or (high == 0 and has_high and (low is None or low < 0 or has_low)):
        starts = low is not None and low >= 0
        patterns += _magnitudes(low if starts else 0, high, has_low or not starts, has_high)
    if low is None or low < 0:
        ends = high is not None and high < 0
        least = -high if ends and high is not None else 0
        most = None if low is None else -low
        patterns += [f"-({each})" for each in _magnitudes(least, most, ends and has_high, has_low)]
    return "|".join(patterns)


def _magnitudes(low: int | None, high: int | None, has_low: bool, has_high: bool) -> list[str]:
    """Return patterns of the numbers between two that are not negative."""
    low = low or 0
    if low == high:
        return [rf"{low}(\.0+)?"] if has_low and has_high else []
    patterns = []
    first = low
    if not has_low:
        patterns.append(rf"{low}\.[0-9]*[1-9][0-9]*")
        first = low + 1
    if high is None or first < high:
        whole = "|".join(_naturals(first, None if high is None else high - 1))
        patterns.append(rf"({whole})(\.[0-9]+)?")
    if high is not None and has_high:
        patterns.append(rf"{high}(\.0+)?")
    return patterns


def multiples_of(factor: int, num_digits: int) -> list[str] | None:
    """Return terminals that all have to match: multiples of ``factor`` of so many digits at most.

    They are in Lark's syntax, one ``NAME: ...`` a line within a text, and the first of a text is
    the one to match. None where they would be too large. Signs and leading zeros are not looked at.
    """
    ends, rest = _suffix_factor(factor)
    texts = []
    if ends > 1:
        texts.append(f"ENDS_{factor}: {_multiples_by_suffix(ends)}")
    if rest > 1:
        if num_digits * rest * min(rest, 10) > _MOST_REMAINDERS:
            return None
        texts.append(_multiples_by_remainder(rest, num_digits))
    return texts


def _suffix_factor(factor: int) -> tuple[int, int]:
    """Return the part of a factor that the last digits decide, where these are few, and the rest.

    1200 is 400 * 3; 2**20 is 1 * 2**20, for 95 million endings of 20 digits are too many.
    """
    ends = math.gcd(factor, 10**MOST_DIGITS)
    if _num_suffix_digits(ends) > 40 or 10 ** _num_suffix_digits(ends) // ends > _MOST_SUFFIXES:
        return 1, factor
    return ends, factor // ends


def _num_suffix_digits(ends: int) -> int:
    digits = 0
    while 10**digits % ends:
        digits += 1
    return digits


def _multiples_by_suffix(ends: int) -> str:
    digits = _num_suffix_digits(ends)
    values = range(0, 10**digits, ends)
    suffixes = "|".join(f"{value:0{digits}}" for value in values)
    short = "|".join(str(value) for value in values)
    return f"/-?([0-9]*({suffixes})|{short})/"


def _multiples_by_remainder(factor: int, num_digits: int) -> str:
    """Return terminals ...K<k>R<r>: k digits that end a multiple, behind others of remainder r."""
    name = f"M{factor}N{num_digits}K{{}}R{{}}".format
    lengths = " | ".join(name(length, 0) for length in range(1, num_digits + 1))
    lines = [f'MULTIPLES_{factor}_{num_digits}: "-"? ({lengths})']
    can_end = {0}  # remainders behind which so many digits can end a multiple
    for left in range(1, num_digits + 1):
        before, can_end = can_end, set()
        for remainder in range(factor):
            digits_by_next: dict[int, str] = {}
            for digit in range(10):
                following = (10 * remainder + digit) % factor
                if following in before:
                    digits_by_next[following] = digits_by_next.get(following, "") + str(digit)
            if digits_by_next:
                can_end.add(remainder)
                ways = [
                    f"/[{digits}]/" + (f" {name(left - 1, following)}" if left > 1 else "")
                    for following, digits in digits_by_next.items()
                ]
                lines.append(f"{name(left, remainder)}: {' | '.join(ways)}")
    return "\n".join(lines)


def _naturals(low: int, high: int | None) -> list[str]:
    """Return patterns of the integers from ``low`` (0 or more) to ``high``."""
    patterns = []
    if high is None:
        patterns.append(f"[1-9][0-9]{{{len(str(low))},}}")
        high = 10 ** len(str(low)) - 1
    for length in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        patterns += _of_one_length(str(least), str(min(high, 10**length - 1)))
    return patterns


def _of_one_length(low: str, high: str) -> list[str]:
    """Return patterns of the numbers between two of as many digits.

    "1234" to "1300" is 123[4-9], 12[4-9][0-9], 1300.
    """
    same = next((i for i, pair in enumerate(zip(low, high, strict=True)) if len({*pair}) > 1), None)
    if same is None:
        return [low]
    patterns = [
        low[:index] + _digits(int(low[index]) + 1, 9, len(low) - index - 1)
        for index in range(len(low) - 1, same, -1)
        if low[index] < "9"
    ]
    patterns.insert(0, low)
    if int(low[same]) + 1 < int(high[same]):
        first, last = int(low[same]) + 1, int(high[same]) - 1
        patterns.append(low[:same] + _digits(first, last, len(low) - same - 1))
    patterns += [
        high[:index] + _digits(0, int(high[index]) - 1, len(high) - index - 1)
        for index in range(same + 1, len(high))
        if high[index] > "0"
    ]
    return [*patterns, high]


def _digits(first: int, last: int, num_more: int) -> str:
    one = str(first) if first == last else f"[{first}-{last}]"
    return f"{one}[0-9]{{{num_more}}}" if num_more else one
