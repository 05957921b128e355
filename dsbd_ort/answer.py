"""Answer one prompt so that it can be shown as it comes, and given up between two iterations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsbd_ort.decoding import TraceRecorder
from dsbd_ort.generated import GenerationResult, StreamStep
from dsbd_runtime.chat_template import Message


class TextGenerator(Protocol):
    """What continues prompts: a Pipeline, or a Service."""

    def stream(
        self, prompt: str | Sequence[int], *, trace: TraceRecorder | None = None, **options: Any
    ) -> Generator[StreamStep, None, GenerationResult]:
        """Continue a prompt step by step; see Pipeline.stream."""

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation; see Pipeline.chat_prompt."""


@dataclass(frozen=True)
class Answer:
    """What came of a prompt.

    Attributes:
        text: of the best sequence; all that was certain, where it was interrupted.
        result: None where it was interrupted.
    """

    text: str
    result: GenerationResult | None


def _never() -> bool:
    return False


def _unseen(_: str) -> None:
    pass


def answer(
    generator: TextGenerator,
    prompt: str | Sequence[int],
    options: dict[str, Any],
    is_interrupted: Callable[[], bool] = _never,
    show: Callable[[str], None] = _unseen,
    trace: TraceRecorder | None = None,
) -> Answer:
    """Continue a prompt.

    Args:
        generator: an opened bundle.
        prompt: text or token ids.
        options: fields of DecodingConfig.
        is_interrupted: asked after every iteration.
        show: gets every piece of text as soon as it is certain.
        trace: is told what every iteration did.
    """
    pieces: list[str] = []
    steps = generator.stream(prompt, trace=trace, **options)
    while True:
        try:
            piece = next(steps).text
        except StopIteration as stop:
            return Answer("".join(pieces), stop.value)
        if piece:
            pieces.append(piece)
            show(piece)
        if is_interrupted():
            steps.close()
            return Answer("".join(pieces), None)
