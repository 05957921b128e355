"""Answer to one prompt, shown while it is generated and interrupted by signals.

Inside ``watched_signals`` SIGINT and SIGTERM only set a flag, ``Interruption.is_requested``, which
is polled between two iterations.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dsbd_ort.decoding import DecodingStats, TraceRecorder, WithResult
from dsbd_ort.engine import Service
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.requests.results import GenerationResult

SIGNALS = (signal.SIGINT, signal.SIGTERM)


TextGenerator = Pipeline | Service


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt."""

    text: str  # text of the best sequence; if interrupted, the text that was final
    result: GenerationResult | None  # None if the answer was interrupted
    # statistics up to the end or the interruption; None before the first iteration
    stats: DecodingStats | None = None


def answer(
    generator: TextGenerator,
    prompt: str | Sequence[int],
    options: dict[str, Any],
    is_interrupted: Callable[[], bool] = lambda: False,
    show: Callable[[str], None] = lambda piece: None,
    trace: TraceRecorder | None = None,
) -> Answer:
    """Continue a prompt.

    is_interrupted: called after every iteration.
    show: called with every piece of text as soon as it is final.
    """
    texts: list[str] = []
    with contextlib.closing(generator.stream(prompt, trace=trace, **options)) as stream:
        pieces = WithResult(stream)
        for piece in pieces:
            if piece.text:
                texts.append(piece.text)
                show(piece.text)
            if is_interrupted():
                stats = piece.stats_so_far() if piece.stats_so_far else None
                return Answer("".join(texts), None, stats)
    return Answer("".join(texts), pieces.result, pieces.result.stats)


class Interruption:
    """Records the first signal; a second signal ends the process at once."""

    def __init__(self) -> None:
        self._signal: int | None = None

    def is_requested(self) -> bool:
        return self._signal is not None

    @property
    def is_termination(self) -> bool:
        """Whether the whole process must end, not only the answer in progress."""
        return self._signal == signal.SIGTERM

    @property
    def exit_code(self) -> int:
        return 0 if self._signal is None else 128 + self._signal

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        if self._signal is not None:
            raise SystemExit(128 + number)
        self._signal = number


@contextlib.contextmanager
def handled_signals(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Install a handler for these signals inside the block (see ``signal.signal``)."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def watched_signals() -> Iterator[Interruption]:
    """Record signals inside the block instead of raising; for the main thread only."""
    interruption = Interruption()
    with handled_signals(SIGNALS, interruption.receive):
        yield interruption
