"""A batch job: answer the lines that are left, show progress on stderr, return the exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsbd_ort.answers import watched_signals
from dsbd_ort.batch.answer_sources import Answers, AnswerSource, Backlog, one_after_another
from dsbd_ort.batch.journal import StandardOutput, open_output
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, read_lines
from dsbd_ort.constraints.binding import TrieFiles, with_constraint
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.prompts import without_languages

_RESUMED = "; run the same command again to go on"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch job."""

    # input, output: JSONL files; the output ``-`` is stdout
    input: Path
    output: Path
    settings: BatchSettings
    source: AnswerSource = one_after_another  # answers the lines


def run_batch(batch: Batch, console: Console) -> int:
    """Answer every line of the input that the output does not answer yet; return the exit code.

    BatchError: the files do not match or cannot be used, or a worker ended.
    """
    DecodingConfig(**with_constraint(without_languages(batch.settings.options), TrieFiles()))
    if batch.output.exists() and batch.input.exists() and batch.output.samefile(batch.input):
        raise BatchError(f"--input and --output are both {batch.input}; give another --output")
    fingerprint = batch.settings.fingerprint()
    num_lines = sum(1 for _ in read_lines(batch.input))
    with open_output(batch.output) as output, watched_signals() as interruption:
        hashes = (line.request_hash(fingerprint) for line in read_lines(batch.input))
        num_done = output.resume(hashes)
        with BatchProgress(num_lines, num_done, console) as progress:
            left = islice(read_lines(batch.input), num_done, None)
            backlog = Backlog(
                settings=batch.settings,
                fingerprint=fingerprint,
                lines=left,
                is_interrupted=interruption.is_requested,
            )
            with closing(_answers(batch.source, backlog)) as answers:
                for answer in answers:
                    output.append(answer.fields)
                    progress.add(answer)
        console.print(progress.summary(), highlight=False, soft_wrap=True)
        if interruption.is_requested():
            resumed = "" if isinstance(output, StandardOutput) else _RESUMED
            console.print(f"interrupted{resumed}", soft_wrap=True)
        return interruption.exit_code


def _answers(source: AnswerSource, backlog: Backlog) -> Answers:
    first = next(backlog.lines, None)
    if first is None:  # nothing is left: open no engine
        return
    yield from source(replace(backlog, lines=chain([first], backlog.lines)))


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

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, answer: LineAnswer) -> None:
        self.num_done += 1
        self.num_errors += answer.is_error
        self.num_tokens += answer.num_tokens
        self._bar.update(self._task, completed=self.num_done, speed=f"{self._speed():.1f} tokens/s")

    def summary(self) -> str:
        before = f", {self._num_before} of them before" if self._num_before else ""
        errors = f"; {self.num_errors} could not be answered, see their error" * bool(
            self.num_errors
        )
        speed = f"; {self.num_tokens} tokens, {self._speed():.1f} tokens/s" * bool(self.num_tokens)
        return f"{self.num_done} of {self._num_lines} lines are done{before}{errors}{speed}"

    def _speed(self) -> float:
        return self.num_tokens / max(self._clock() - self._began, 1e-9)
