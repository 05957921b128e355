"""Answer lines by several processes, each with a pipeline of its own; the order is kept."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from dsbd_errors import DsbdError
from dsbd_ort.batch.errors import BatchError
from dsbd_ort.batch.line_answer import LineAnswer, answer_line
from dsbd_ort.batch.prompt_line import RawLine
from dsbd_ort.batch.settings import BatchSettings

_WAIT_SECONDS = 0.2  # how long a wish to end may go unheard
_AHEAD = 8  # lines per worker that may be answered before an earlier one is


@dataclass(frozen=True)
class _Ready:
    """A worker has opened its bundle; ``refusal`` says why it could not."""

    refusal: str | None = None


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def receive(self) -> object:
        """Return what the worker sends next."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise BatchError(
                f"worker process {self.process.pid} ended with exit code {self.process.exitcode}; "
                "run the same command again to go on, with fewer --workers if memory ran out"
            ) from error

    def send(self, line: RawLine) -> None:
        """Give the worker a line; that it has ended shows when its answer is awaited."""
        with contextlib.suppress(OSError):
            self.connection.send(line)


def answers_by_workers(
    settings: BatchSettings,
    fingerprint: str,
    lines: Iterator[RawLine],
    num_workers: int,
    is_interrupted: Callable[[], bool],
) -> Iterator[LineAnswer]:
    """Yield the answers in the order of ``lines``; end early where that is wanted.

    Raises:
        BatchError: a worker could not open the bundle, or ended.
    """
    with _started(_with_share_of_threads(settings, num_workers), fingerprint, num_workers) as idle:
        busy: dict[object, tuple[_Worker, int]] = {}  # by connection
        answers: dict[int, LineAnswer] = {}
        num_sent = num_given = 0
        while not is_interrupted():
            while idle and num_sent - num_given < _AHEAD * num_workers:
                if (line := next(lines, None)) is None:
                    break
                worker = idle.pop()
                worker.send(line)
                busy[worker.connection] = (worker, num_sent)
                num_sent += 1
            if not busy and not answers:
                return
            connections = [worker.connection for worker, _ in busy.values()]
            for connection in wait(connections, _WAIT_SECONDS):
                worker, index = busy.pop(connection)
                idle.append(worker)
                received = worker.receive()
                assert isinstance(received, LineAnswer)
                answers[index] = received
            while num_given in answers:
                yield answers.pop(num_given)
                num_given += 1


def _with_share_of_threads(settings: BatchSettings, num_workers: int) -> BatchSettings:
    pipeline = settings.pipeline
    share = max(1, (pipeline.num_threads or usable_cores()) // num_workers)
    return replace(settings, pipeline=replace(pipeline, num_threads=share))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _started(
    settings: BatchSettings, fingerprint: str, num_workers: int
) -> Iterator[list[_Worker]]:
    """Start the workers and wait until all have opened the bundle; end them in the end."""
    workers: list[_Worker] = []
    try:
        with _ignored_signals():
            for _ in range(num_workers):
                workers.append(_start(settings, fingerprint))
        for worker in workers:
            ready = worker.receive()
            assert isinstance(ready, _Ready)
            if ready.refusal is not None:
                raise BatchError(ready.refusal)
        yield list(workers)
    finally:
        for worker in workers:
            worker.process.kill()  # it holds nothing that is not done again
        for worker in workers:
            worker.process.join()
            worker.connection.close()


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    """Let processes that start inside the block ignore signals to all: this one ends them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(settings: BatchSettings, fingerprint: str) -> _Worker:
    context = multiprocessing.get_context("spawn")  # an engine's threads do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(settings, fingerprint, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end shows here as the end of the connection
    return _Worker(process, ours)


def _work(settings: BatchSettings, fingerprint: str, connection: Connection) -> None:
    """Answer lines until the other side closes the connection or ends."""
    try:
        opened = settings.pipeline.open()
    except DsbdError as error:
        connection.send(_Ready(str(error)))
        return
    with opened as pipeline, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send(_Ready())
        while True:
            line = connection.recv()
            connection.send(answer_line(pipeline, settings, fingerprint, line, lambda: False))
