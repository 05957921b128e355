"""What a user sees of a long phase: a line now and then, and no warnings of libraries."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Report = Callable[[str], None]
"""Gets a short line."""

Clock = Callable[[], float]
Part = TypeVar("Part")

SECONDS_BETWEEN = 10.0
_WARNING_LOGGERS = ("torch.onnx", "transformers")


def silent(_: str) -> None:
    """Report nothing."""


class Counter:
    """Counts the parts of a phase.

    Args:
        phase: as its own line names it, such as "target: comparing with the checkpoint".
        parts: what is counted, such as "cases".
        report: gets "PHASE: 5 of 13 cases", at most once in ``SECONDS_BETWEEN``.
        clock: tells the seconds.
    """

    def __init__(
        self, phase: str, parts: str, report: Report, *, clock: Clock = time.monotonic
    ) -> None:
        self._phase, self._parts = phase, parts
        self._report, self._clock = report, clock
        self._last = clock()

    def done(self, number: int, total: int) -> None:
        """Say that so many parts are done, if it is time; the last one ends the phase, unsaid."""
        now = self._clock()
        if number < total and now - self._last >= SECONDS_BETWEEN:
            self._last = now
            self._report(f"{self._phase}: {number:,} of {total:,} {self._parts}")


def counted(parts: Sequence[Part], counter: Counter) -> Iterator[Part]:
    """Yield the parts of a phase, each counted when the next one is asked for."""
    for number, part in enumerate(parts, 1):
        yield part
        counter.done(number, len(parts))


@contextlib.contextmanager
def silenced_libraries() -> Iterator[None]:
    """Keep what libraries warn of from a user, who can do nothing about it."""
    loggers = [logging.getLogger(name) for name in _WARNING_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for category in (UserWarning, FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
