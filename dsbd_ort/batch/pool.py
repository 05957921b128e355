"""Several members answer lines side by side; their answers are put in the order of the lines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from dsbd_ort.batch.line_answer import LineAnswer
from dsbd_ort.batch.prompt_line import RawLine

_WAIT_SECONDS = 0.2  # how long a wish to end may go unheard
_AHEAD = 8  # lines per member that may be answered before an earlier one is


class Pool(Protocol):
    """Members that work on one line each."""

    num_members: int

    def has_idle(self) -> bool:
        """Tell whether a member has nothing to do."""

    def send(self, index: int, line: RawLine) -> None:
        """Give an idle member a line, the ``index``-th one."""

    def receive(self, seconds: float) -> list[tuple[int, LineAnswer]]:
        """Wait at most ``seconds`` for answers; return those that came, with their indices."""


def answers_in_order(
    pool: Pool, lines: Iterator[RawLine], is_interrupted: Callable[[], bool]
) -> Generator[LineAnswer, None, None]:
    """Yield the answers in the order of ``lines``; end early where that is wanted."""
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
