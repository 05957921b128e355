"""A batch job: answers the lines that are left, appends to the output file, shows progress.

The output has one answer per line; an interrupted batch resumes from it. A line is written to the
operating system as soon as it is answered; the file is synced to disk every few seconds and at the
end. Only one process at a time writes to a file, even by different paths: the open file itself is
locked, and the lock ends with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from filelock import lock_descriptor
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsbd_ort.batch.answer_sources import Answers, AnswerSource, Backlog, one_after_another
from dsbd_ort.batch.answers import watched_signals
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, read_lines
from dsbd_ort.constraints.binding import TrieFiles, with_constraint
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.requests.prompts import without_languages
from dsbd_ort.requests.results import JSON_VERSION, json_text

SYNC_SECONDS = 5.0
# Every line begins like this. A torn line with this beginning is dropped; any other is an error.
_HEAD = f'{{"version": {JSON_VERSION}, "line": '.encode()


class Journal:
    """The open output file; see ``open_journal``."""

    def __init__(self, file: Path, descriptor: int, clock: Callable[[], float]) -> None:
        self._file = file
        self._descriptor = descriptor
        self._clock = clock
        self._size = 0  # bytes of whole lines
        self.synced_at = clock()

    def resume(self, request_hashes: Iterable[str]) -> int:
        """Return how many lines are done; drop a torn last line; BatchError: not these requests."""
        hashes = iter(request_hashes)
        num_done, torn = 0, b""
        with (
            _batch_errors(self._file, "read"),
            open(self._descriptor, "rb", closefd=False) as lines,
        ):
            for line in lines:
                request = None if torn else _request_of(line)
                if request is None:
                    torn += line
                    continue
                if request != next(hashes, None):
                    raise self._foreign(num_done + 1, "is of another input or other options")
                num_done += 1
                self._size += len(line)
        # An unfinished line, or the remains of a power cut, may be dropped.
        begun = torn.rstrip(b"\0")
        if b"\n" in begun or not _HEAD.startswith(begun[: len(_HEAD)]):
            raise self._foreign(num_done + 1, "was not written by dsbd-run")
        if torn:
            with _batch_errors(self._file, "written"):
                os.ftruncate(self._descriptor, self._size)
        return num_done

    def append(self, fields: dict[str, Any]) -> None:
        """Write one line, completely or not at all."""
        line = json_text(fields).encode() + b"\n"
        with _batch_errors(self._file, "written"):
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(line)
        if self._clock() - self.synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        with _batch_errors(self._file, "written"):
            os.fsync(self._descriptor)
        self.synced_at = self._clock()

    def _foreign(self, number: int, what: str) -> BatchError:
        return BatchError(
            f"--output {self._file}: line {number} {what}; to resume it, give the input, "
            "bundle and options that it was started with, else another --output"
        )


class StandardOutput:
    """The answers of a batch on stdout, which cannot be resumed."""

    def resume(self, request_hashes: Iterable[str]) -> int:
        return 0

    def append(self, fields: dict[str, Any]) -> None:
        sys.stdout.write(json_text(fields) + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def open_output(file: Path) -> Iterator[Journal | StandardOutput]:
    """Open the output of a batch: ``-`` is stdout, any other path is opened by ``open_journal``."""
    if file != Path("-"):
        with open_journal(file) as journal:
            yield journal
    elif sys.stdout is None:
        raise BatchError("--output is - (stdout), which is closed; give a file")
    else:
        yield StandardOutput()


@contextlib.contextmanager
def open_journal(
    file: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    lock: Callable[..., bool] = lock_descriptor,
) -> Iterator[Journal]:
    """Open or create the output and lock it; BatchError: it cannot be written, or is locked."""
    if not file.parent.is_dir():
        raise BatchError(f"--output {file} cannot be written: make the folder {file.parent} first")
    if file.exists() and not file.is_file():
        raise BatchError(f"--output {file} is not a regular file; give one that can be appended to")
    with _batch_errors(file, "written"):
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        try:
            is_ours = lock(descriptor, blocking=False)
        except OSError as error:
            raise BatchError(
                f"--output {file} cannot be locked ({error.strerror or error}); "
                "give an --output on a file system with locks"
            ) from error
        if not is_ours:
            raise BatchError(
                f"--output {file} is being written by another process; wait for it, or give "
                "another --output"
            )
        journal = Journal(file, descriptor, clock)
        yield journal
        journal.sync()
    finally:
        os.close(descriptor)  # also releases the lock


@contextlib.contextmanager
def _batch_errors(file: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a BatchError that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise BatchError(
            f"--output {file} cannot be {what}: {error.strerror or error}; complete lines in "
            "it are kept: fix that and run the same command again to go on"
        ) from error


def _request_of(line: bytes) -> str | None:
    if not line.endswith(b"\n"):
        return None
    try:
        request = json.loads(line)["request"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return request if isinstance(request, str) else None


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
