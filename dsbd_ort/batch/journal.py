"""Output file of a batch: append-only, one answer per line; an interrupted batch resumes from it.

A line is written to the operating system as soon as it is answered, and synced to disk every few
seconds and at the end.

One process at a time writes to a file, by whatever path: the open file itself is locked, and the
lock ends with the process.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from dsbd_ort.batch.prompt_lines import BatchError
from dsbd_ort.results import JSON_VERSION, json_text

SYNC_SECONDS = 5.0
# Every line begins like this: a torn line that does is dropped, anything else is an error.
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
        """Return how many lines are done, without a torn last one; raise BatchError for others."""
        hashes = iter(request_hashes)
        num_done, torn = 0, b""
        with (
            _batch_errors(self._file, "read"),
            open(self._descriptor, "rb", closefd=False) as lines,
        ):
            for line in lines:
                found = None if torn else _request_of(line)
                if found is None:
                    torn += line
                    continue
                if found != next(hashes, None):
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
    """Open the output of a batch: ``-`` is stdout, any other path a file of ``open_journal``."""
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
    """Open or create the output, locked; raise BatchError if it cannot be written or is locked."""
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
        os.close(descriptor)  # which ends the lock


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
