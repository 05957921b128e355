"""Sources of a batch's answers: one pipeline, threads that share engine calls, pools of workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, RawLine, answer_line
from dsbd_ort.engine import Service, ServiceLimits

_WAIT_SECONDS = 0.2  # between two checks for an interruption
_AHEAD = 8  # lines per member that may be answered before an earlier one is


Answers = Generator[LineAnswer, None, None]


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """The lines of a batch that are left to answer.

    Attributes:
        settings: shared by all lines.
        fingerprint: of the settings, part of each answer's request hash.
        lines: in the order of the answers.
        is_interrupted: whether the batch has to end before the last line.
    """

    settings: BatchSettings
    fingerprint: str
    lines: Iterator[RawLine]
    is_interrupted: Callable[[], bool]


class AnswerSource(Protocol):
    """Answers the lines of a batch; closing the generator ends the workers behind it."""

    def answers(self, backlog: Backlog) -> Answers:
        """Yield the answers in the order of the lines; end early on an interruption."""


class ThisProcess:
    """One pipeline of this process, which answers one line after another."""

    def answers(self, backlog: Backlog) -> Answers:
        """See AnswerSource."""
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


class AnswerPool(Protocol):
    """Members that answer one line each at a time."""

    num_members: int

    def has_idle(self) -> bool:
        """Return whether a member is idle."""

    def send(self, index: int, line: RawLine) -> None:
        """Give an idle member a line, the ``index``-th one."""

    def receive(self, seconds: float) -> list[tuple[int, LineAnswer]]:
        """Wait at most ``seconds`` for answers; return those received, with their indices."""


def answers_in_order(
    pool: AnswerPool, lines: Iterator[RawLine], is_interrupted: Callable[[], bool]
) -> Answers:
    """Yield the answers of a pool in the order of ``lines``; end early on an interruption."""
    answers: dict[int, LineAnswer] = {}
    num_sent = num_given = 0
    while not is_interrupted():
        while pool.has_idle() and num_sent - num_given < _AHEAD * pool.num_members:
            if (line := next(lines, None)) is None:
                break
            pool.send(num_sent, line)
            num_sent += 1
        if num_given == num_sent:
            return
        answers.update(pool.receive(_WAIT_SECONDS))
        while num_given in answers:
            yield answers.pop(num_given)
            num_given += 1


@dataclass(frozen=True)
class SharedCalls:
    """One pipeline that answers ``num_requests`` lines at a time."""

    num_requests: int

    def answers(self, backlog: Backlog) -> Answers:
        """See AnswerSource."""
        limits = ServiceLimits(max_requests=self.num_requests, max_queued=self.num_requests)
        is_over = threading.Event()

        def may_stop() -> bool:
            return is_over.is_set() or backlog.is_interrupted()

        with (
            backlog.settings.pipeline.open() as pipeline,
            Service(pipeline, limits) as service,
            ThreadPoolExecutor(self.num_requests) as threads,
        ):

            def ask(line: RawLine) -> LineAnswer | None:
                answer = answer_line(service, backlog.settings, backlog.fingerprint, line, may_stop)
                if not service.is_open:  # its error is that of the engines, not of the line
                    raise BatchError(
                        "the thread that runs the engines has ended; run the same command again "
                        "to go on, with a smaller --concurrency if memory ran out"
                    )
                return answer

            try:
                pool = _Threads(threads, self.num_requests, ask)
                yield from answers_in_order(pool, backlog.lines, backlog.is_interrupted)
            finally:
                is_over.set()


class _Threads:
    """See AnswerPool."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        num_members: int,
        ask: Callable[[RawLine], LineAnswer | None],
    ) -> None:
        self.num_members = num_members
        self._threads = threads
        self._ask = ask
        self._busy: dict[Future[LineAnswer | None], int] = {}

    def has_idle(self) -> bool:
        return len(self._busy) < self.num_members

    def send(self, index: int, line: RawLine) -> None:
        self._busy[self._threads.submit(self._ask, line)] = index

    def receive(self, seconds: float) -> list[tuple[int, LineAnswer]]:
        done, _ = wait(self._busy, seconds, return_when=FIRST_COMPLETED)
        given = [(self._busy.pop(future), future.result()) for future in done]
        return [(index, answer) for index, answer in given if answer is not None]
