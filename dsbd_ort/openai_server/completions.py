"""The answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Literal

from pydantic import BaseModel

from dsbd_ort.openai_server.answer_shape import AnswerChoice, AnswerHead, Report, TokenPieces, Usage


class CompletionLogprobs(BaseModel):
    """Of every token: its text, raw log-probability, and where its text begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One sequence, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """An answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    dsbd: Report | None = None


class CompletionShape:
    """An AnswerShape."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = asdict(head)
        self._offset_by_index: dict[int, int] = {}

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage, report: Report) -> Completion:
        """See AnswerShape."""
        shaped = [
            CompletionChoice(
                index=choice.index,
                text=choice.text,
                logprobs=self._logprobs(choice.index, choice.tokens),
                finish_reason=choice.finish_reason,  # type: ignore[arg-type]  # pydantic checks it
            )
            for choice in choices
        ]
        return Completion(**self._head, choices=shaped, usage=usage, dsbd=report)

    def opening(self, index: int) -> None:
        """See AnswerShape."""

    def piece(self, index: int, text: str, tokens: TokenPieces | None) -> Completion:
        """See AnswerShape."""
        logprobs = self._logprobs(index, tokens)
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs)
        return Completion(**self._head, choices=[choice])

    def ending(self, index: int, finish_reason: str, report: Report) -> Completion:
        """See AnswerShape."""
        choice = CompletionChoice(index=index, text="", finish_reason=finish_reason)  # type: ignore[arg-type]
        return Completion(**self._head, choices=[choice], dsbd=report)

    def closing(self, usage: Usage) -> Completion:
        """See AnswerShape."""
        return Completion(**self._head, choices=[], usage=usage)

    def _logprobs(self, index: int, tokens: TokenPieces | None) -> CompletionLogprobs | None:
        """Return a choice's next log-probabilities; its texts go on where they ended."""
        if tokens is None:
            return None
        begin = self._offset_by_index.get(index, 0)
        *offsets, end = accumulate(map(len, tokens.texts), initial=begin)
        self._offset_by_index[index] = end
        return CompletionLogprobs(
            tokens=list(tokens.texts), token_logprobs=list(tokens.logprobs), text_offset=offsets
        )
