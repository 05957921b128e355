"""Sources of a batch's answers: one pipeline, or several members.

Members are threads that share the engine calls of one pipeline, processes, or replicas of a
cluster. A member answers one line at a time.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import TypeVar

from dsbd_errors import DsbdError
from dsbd_ort.batch.answers import SIGNALS, handled_signals
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, RawLine, answer_line
from dsbd_ort.engine import Service, ServiceLimits

WAIT_SECONDS = 0.2  # between two checks for an interruption
_AHEAD = 8  # lines per member that may be answered while an earlier line is not

Answers = Generator[LineAnswer, None, None]
Member = TypeVar("Member")
MayStop = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """The lines of a batch that are left to answer."""

    settings: BatchSettings
    fingerprint: str  # hash of the settings, part of each answer's request hash
    lines: Iterator[RawLine]
    is_interrupted: Callable[[], bool]  # returns whether the batch must end before the last line


AnswerSource = Callable[[Backlog], Answers]
"""Yields the answers in the order of the lines, and ends early on an interruption; closing the
generator ends its workers."""


def one_after_another(backlog: Backlog) -> Answers:
    """AnswerSource: one pipeline of this process, which answers one line after another."""
    with backlog.settings.pipeline.open() as pipeline:
        for line in backlog.lines:
            answer = answer_line(
                pipeline, backlog.settings, backlog.fingerprint, line, backlog.is_interrupted
            )
            if answer is None:
                return
            yield answer
            if backlog.is_interrupted():
                return


def answers_in_order(
    members: Sequence[Member],
    ask: Callable[[Member, RawLine, MayStop], LineAnswer | None],
    backlog: Backlog,
) -> Answers:
    """Yield the answers of several members, in the order of the lines.

    ask: called in one thread per member; returns the member's answer to a line. It may return None
        once the function that it receives returns True.
    """
    idle: SimpleQueue[Member] = SimpleQueue()
    for member in members:
        idle.put(member)
    is_over = threading.Event()

    def may_stop() -> bool:
        return is_over.is_set() or backlog.is_interrupted()

    def answer(line: RawLine) -> LineAnswer | None:
        member = idle.get()
        try:
            return ask(member, line, may_stop)
        finally:
            idle.put(member)

    waiting: deque[Future[LineAnswer | None]] = deque()
    with ThreadPoolExecutor(len(members)) as threads:
        try:
            while not backlog.is_interrupted():
                while len(waiting) < _AHEAD * len(members) and (line := next(backlog.lines, None)):
                    waiting.append(threads.submit(answer, line))
                if not waiting:
                    return
                wait([waiting[0]], WAIT_SECONDS)
                while waiting and waiting[0].done():
                    if (given := waiting.popleft().result()) is None:
                        return
                    yield given
        finally:
            is_over.set()
            threads.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class SharedCalls:
    """AnswerSource: one pipeline that answers ``num_requests`` lines at a time."""

    num_requests: int

    def __call__(self, backlog: Backlog) -> Answers:
        limits = ServiceLimits(max_requests=self.num_requests, max_queued=self.num_requests)

        def ask(service: Service, line: RawLine, may_stop: MayStop) -> LineAnswer | None:
            answer = answer_line(service, backlog.settings, backlog.fingerprint, line, may_stop)
            if not service.is_open:  # the error is the engines', not the line's
                raise BatchError(
                    "the thread that runs the engines has ended; run the same command again to go "
                    "on, with a smaller --concurrency if memory ran out"
                )
            return answer

        with backlog.settings.pipeline.open() as pipeline, Service(pipeline, limits) as service:
            yield from answers_in_order([service] * self.num_requests, ask, backlog)


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def answer(self, line: RawLine, may_stop: MayStop) -> LineAnswer | None:
        """Return the answer; None if ``may_stop``. BatchError: the worker process ended."""
        with contextlib.suppress(OSError):  # the worker has ended, see below
            self.connection.send(line)
        try:
            while not self.connection.poll(WAIT_SECONDS):
                if may_stop():
                    return None
            received = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise BatchError(
                f"worker process {self.process.pid} ended with exit code {self.process.exitcode}; "
                "run the same command again to go on, with fewer --workers if memory ran out"
            ) from error
        if isinstance(received, str):
            raise BatchError(received)
        assert isinstance(received, LineAnswer)
        return received


@dataclass(frozen=True)
class Workers:
    """AnswerSource: several processes, which share the cores of this machine."""

    num_workers: int

    def __call__(self, backlog: Backlog) -> Answers:
        pipeline = backlog.settings.pipeline
        share = max(1, (pipeline.num_threads or usable_cores()) // self.num_workers)
        shared = replace(backlog.settings, pipeline=replace(pipeline, num_threads=share))
        with _started(shared, backlog.fingerprint, self.num_workers) as workers:
            yield from answers_in_order(workers, _Worker.answer, backlog)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _started(
    settings: BatchSettings, fingerprint: str, num_workers: int
) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        with handled_signals(SIGNALS, signal.SIG_IGN):  # for the workers, which this process ends
            for _ in range(num_workers):
                workers.append(_start(settings, fingerprint))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()  # an unfinished line is answered again
        for worker in workers:
            worker.process.join()
            worker.connection.close()


def _start(settings: BatchSettings, fingerprint: str) -> _Worker:
    context = multiprocessing.get_context("spawn")  # an engine's threads do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(settings, fingerprint, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the connection closes here when the process ends
    return _Worker(process, ours)


def _work(settings: BatchSettings, fingerprint: str, connection: Connection) -> None:
    """Answer lines until the other side closes; send an error if the bundle cannot be opened."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            opened = settings.pipeline.open()
        except DsbdError as error:
            connection.send(str(error))
            return
        with opened as pipeline:
            while True:
                line = connection.recv()
                connection.send(answer_line(pipeline, settings, fingerprint, line, lambda: False))
