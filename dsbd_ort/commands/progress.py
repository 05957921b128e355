"""Progress of a long command on stderr: lines, repeated during long silences, and slow phases."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from dsbd_export.progress import shown
from dsbd_runtime.phases import PHASES

SECONDS_OF_PATIENCE = 2.0
"""A phase of an opening that takes longer is printed."""

SECONDS_OF_SILENCE = 30.0
"""After this many seconds without a line, a line repeats the phase and how long it has lasted."""


@contextlib.contextmanager
def shown_progress(
    *, console: Console | None = None, silence: float = SECONDS_OF_SILENCE
) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line; in a long phase the line is repeated with the time."""
    lines = _Lines(console or Console(stderr=True))
    is_over = threading.Event()

    def keep_saying() -> None:
        while not is_over.wait(silence / 4):
            lines.say_again(silence)

    thread = threading.Thread(target=keep_saying, name="progress", daemon=True)
    thread.start()
    try:
        yield lines.say
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def slow_phases(*, patience: float = SECONDS_OF_PATIENCE) -> Iterator[None]:
    """Print on stderr the phases of an opening that take longer than ``patience`` seconds."""
    handler = _SlowPhases(patience)
    level = PHASES.level
    PHASES.addHandler(handler)
    PHASES.setLevel(logging.INFO)
    try:
        yield
    finally:
        PHASES.removeHandler(handler)
        PHASES.setLevel(level)
        handler.close()


class _SlowPhases(logging.Handler):
    def __init__(self, patience: float) -> None:
        super().__init__()
        self._patience = patience
        self._shown: str | None = None
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Begin or end a phase; at its end, a phase that was shown is shown with its seconds."""
        self.close()
        line = record.getMessage()
        if hasattr(record, "seconds"):
            if self._shown is not None and line.startswith(self._shown):
                self._print(line)
            return
        self._timer = threading.Timer(self._patience, self._show, [line])
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().close()

    def _show(self, line: str) -> None:
        self._shown = line
        self._print(f"{line} ...")

    def _print(self, line: str) -> None:
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._phase: str | None = None
        self._began = self._last = time.monotonic()

    def say(self, line: str) -> None:
        with self._lock:
            if self._phase is None or not line.startswith(f"{self._phase}: "):
                self._phase, self._began = line, time.monotonic()
            self._print(line)

    def say_again(self, silence: float) -> None:
        """Print the phase again if nothing was printed for ``silence`` seconds."""
        with self._lock:
            now = time.monotonic()
            if self._phase is not None and now - self._last >= silence:
                self._print(f"{self._phase}: {shown(now - self._began)} so far")

    def _print(self, line: str) -> None:
        self._last = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
