"""Progress lines of long phases; silencing of libraries' warnings."""

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO, TypeVar

Report = Callable[[str], None]
"""Receives a short line of text."""

Clock = Callable[[], float]
Part = TypeVar("Part")

SECONDS_BETWEEN = 10.0
MB = "MB"
_WARNING_LOGGERS = ("torch.onnx", "transformers")


def silent(_: str) -> None:
    """Report nothing."""


class Counter:
    """Reports how much of a phase is done and how long the rest may take.

    parts: name of the counted things, such as "cases"; ``MB`` for bytes; "" if nothing is counted.
    report: gets "PHASE: 5 of 13 cases, about 40 s left", at most once in ``SECONDS_BETWEEN``.
    """

    def __init__(
        self, phase: str, parts: str, report: Report, *, clock: Clock = time.monotonic
    ) -> None:
        self._phase, self._parts = phase, parts
        self._report, self._clock = report, clock
        self._began = self._last = clock()

    def done(self, number: int, total: int) -> None:
        """Report that ``number`` of ``total`` parts are done, if it is time and parts remain."""
        if 0 < number < total:
            shown_as, unit = (".1f", 10**6) if self._parts == MB else (".0f", 1)
            amounts = (f"{each / unit:,{shown_as}}" for each in (number, total))
            self._say(f"{' of '.join(amounts)} {self._parts}", number / total)

    def passed(self, share: float) -> None:
        """Report that a share of the phase, between 0 and 1, is done."""
        self._say(f"{share:.0%}", share)

    def _say(self, done: str, share: float) -> None:
        now = self._clock()
        if now - self._last >= SECONDS_BETWEEN:
            self._last = now
            left = shown((now - self._began) * (1 - share) / share)
            self._report(f"{self._phase}: {done}, about {left} left")


class PrintedSteps(io.TextIOBase):
    """A stream that receives the steps that a library prints; some of them are reported."""

    def __init__(self, share_by_text: Mapping[str, float], counter: Counter) -> None:
        self._share_by_text, self._counter = share_by_text, counter

    def write(self, text: str) -> int:
        """Report the share of a known step; print nothing."""
        if (share := self._share_by_text.get(text)) is not None:
            self._counter.passed(share)
        return len(text)


def to_stdout(report: Report, stdout: TextIO) -> Report:
    """Return a report that prints to ``stdout`` even while stdout is redirected."""

    def printed(line: str) -> None:
        with contextlib.redirect_stdout(stdout):
            report(line)

    return printed


def counted(
    parts: Sequence[Part], counter: Counter, size_of: Callable[[Part], int] = lambda _: 1
) -> Iterator[Part]:
    """Yield the parts of a phase; a part's size is counted when the next part is requested."""
    done, total = 0, sum(map(size_of, parts))
    for part in parts:
        yield part
        done += size_of(part)
        counter.done(done, total)


def shown(seconds: float) -> str:
    """Return a duration in words: "40 s", "12.5 min"."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


@contextlib.contextmanager
def silenced_libraries() -> Iterator[None]:
    """Silence warnings of libraries, which a user cannot act on."""
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
