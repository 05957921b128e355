"""Let a command clean up when it is asked to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_EXIT_CODE = 128 + signal.SIGTERM  # what a shell reports of a command that this signal ended


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Turn SIGTERM into an exception inside the block, as Python does with Ctrl-C.

    Python's default ends the process on the spot: no ``finally`` runs, files stay behind.
    """
    previous = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(_EXIT_CODE)
