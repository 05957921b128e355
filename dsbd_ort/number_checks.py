"""Bounds of numbers in settings: finite, and within the range of clocks, sockets and memory."""

from __future__ import annotations

from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short

MOST = 2**31 - 1
"""Of counts."""
MOST_BYTES = 2**53
"""Of caches and bodies; exact in every reader of JSON."""
MOST_SECONDS = 7 * 24 * 3600
"""Of timeouts: a week, which every clock and socket can count in milliseconds."""


def check_count(name: str, value: object, least: int, most: int = MOST) -> None:
    """Raise InputError unless ``value`` is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise InputError(
            f"{name} is {in_short(value)}; expected a whole number from {least} to {most}"
        )


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Raise InputError unless ``value`` is a number of seconds, at most a week of them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value <= MOST_SECONDS or (may_be_zero and value == 0):
            return
    raise InputError(
        f"{name} is {in_short(value)}; expected seconds, {'from' if may_be_zero else 'more than'} "
        f"0 up to {MOST_SECONDS}"
    )
