"""Answer lines by several threads of this process whose requests share the engine calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dsbd_ort.batch.errors import BatchError
from dsbd_ort.batch.line_answer import LineAnswer, answer_line
from dsbd_ort.batch.pool import answers_in_order
from dsbd_ort.batch.prompt_line import RawLine
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.engine import Service, ServiceLimits


@dataclass(frozen=True)
class SharedCalls:
    """One pipeline that answers ``num_requests`` lines at a time."""

    num_requests: int

    def answers(
        self,
        settings: BatchSettings,
        fingerprint: str,
        lines: Iterator[RawLine],
        is_interrupted: Callable[[], bool],
    ) -> Generator[LineAnswer, None, None]:
        """See AnswerSource."""
        limits = ServiceLimits(max_requests=self.num_requests, max_queued=self.num_requests)
        is_over = threading.Event()

        def may_stop() -> bool:
            return is_over.is_set() or is_interrupted()

        with (
            settings.pipeline.open() as pipeline,
            Service(pipeline, limits) as service,
            ThreadPoolExecutor(self.num_requests) as threads,
        ):

            def ask(line: RawLine) -> LineAnswer | None:
                answer = answer_line(service, settings, fingerprint, line, may_stop)
                if not service.is_open:  # its error is that of the engines, not of the line
                    raise BatchError(
                        "the thread that runs the engines has ended; run the same command again "
                        "to go on, with a smaller --concurrency if memory ran out"
                    )
                return answer

            try:
                pool = _Threads(threads, self.num_requests, ask)
                yield from answers_in_order(pool, lines, is_interrupted)
            finally:
                is_over.set()


class _Threads:
    """See Pool."""

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
