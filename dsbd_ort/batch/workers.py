"""Worker processes that answer the lines of a batch, each with a pipeline of its own."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from dsbd_errors import DsbdError
from dsbd_ort.answers import SIGNALS, handled_signals
from dsbd_ort.batch.answer_sources import WAIT_SECONDS, Answers, Backlog, MayStop, answers_in_order
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, RawLine, answer_line


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def answer(self, line: RawLine, may_stop: MayStop) -> LineAnswer | None:
        """Return the answer, None if the batch may stop; raise BatchError if the worker ended."""
        with contextlib.suppress(OSError):  # it has ended, see below
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
    """AnswerSource: processes of this machine that share its cores."""

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
        with handled_signals(SIGNALS, signal.SIG_IGN):  # to the group: this process ends them
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
    theirs.close()  # so that the end of the process closes the connection here
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
