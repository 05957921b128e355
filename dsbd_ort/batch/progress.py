"""How far a batch is: a bar on stderr, and one sentence in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsbd_ort.batch.line_answer import LineAnswer


class BatchProgress:
    """Lines done, time left, tokens per second; a context manager."""

    def __init__(
        self,
        num_lines: int,
        num_done: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._num_lines = num_lines
        self._num_before = num_done
        self.num_done = num_done
        self.num_errors = 0
        self.num_tokens = 0
        self._bar = Progress(
            TextColumn("lines"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=num_lines, completed=num_done, speed="")

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, answer: LineAnswer) -> None:
        """Count one line."""
        self.num_done += 1
        self.num_errors += answer.is_error
        self.num_tokens += answer.num_tokens
        self._bar.update(self._task, completed=self.num_done, speed=f"{self._speed():.1f} tokens/s")

    def summary(self) -> str:
        """Return what became of the lines."""
        before = f", {self._num_before} of them before" if self._num_before else ""
        errors = f"; {self.num_errors} could not be answered, see their error" * bool(
            self.num_errors
        )
        speed = f"; {self.num_tokens} tokens, {self._speed():.1f} tokens/s" * bool(self.num_tokens)
        return f"{self.num_done} of {self._num_lines} lines are done{before}{errors}{speed}"

    def _speed(self) -> float:
        return self.num_tokens / max(self._clock() - self._began, 1e-9)
