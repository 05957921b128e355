"""Sources of a batch's answers: one pipeline, or members that answer a line each at a time."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, RawLine, answer_line
from dsbd_ort.engine import Service, ServiceLimits

WAIT_SECONDS = 0.2  # between two checks for an interruption
_AHEAD = 8  # lines per member that may be answered before an earlier one is

Answers = Generator[LineAnswer, None, None]
Member = TypeVar("Member")
MayStop = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """The lines of a batch that are left to answer."""

    settings: BatchSettings
    fingerprint: str  # of the settings, part of each answer's request hash
    lines: Iterator[RawLine]
    is_interrupted: Callable[[], bool]  # whether the batch has to end before the last line


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
    """Yield the answers of members that answer one line each at a time, in the order of the lines.

    ask: called in a thread of each member, until the answer is there. It may return None once the
    function that it receives returns True.
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
            if not service.is_open:  # its error is that of the engines, not of the line
                raise BatchError(
                    "the thread that runs the engines has ended; run the same command again to go "
                    "on, with a smaller --concurrency if memory ran out"
                )
            return answer

        with backlog.settings.pipeline.open() as pipeline, Service(pipeline, limits) as service:
            yield from answers_in_order([service] * self.num_requests, ask, backlog)
