"""Ctrl-C and SIGTERM as a question that the work asks when it suits it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """The first signal is remembered; a second one does not wait for the work to ask."""

    def __init__(self) -> None:
        self._signal: int | None = None

    def is_wanted(self) -> bool:
        """Tell whether somebody wants the work to end."""
        return self._signal is not None

    @property
    def is_termination(self) -> bool:
        """Whether the whole process is to end, not only what it does just now."""
        return self._signal == signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """What a shell reports of a command that the signal ended; 0 where none came."""
        return 0 if self._signal is None else 128 + self._signal

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """Take a signal."""
        if self._signal is not None:
            raise SystemExit(128 + number)
        self._signal = number


@contextlib.contextmanager
def watched_signals() -> Iterator[Interruption]:
    """Inside the block signals do not tear the work apart; for the main thread only."""
    interruption = Interruption()
    previous = {number: signal.signal(number, interruption.receive) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
