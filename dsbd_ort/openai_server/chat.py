"""The answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from dsbd_ort.openai_server.answer_shape import AnswerChoice, AnswerHead, Report, TokenPieces, Usage


class TokenLogprob(BaseModel):
    """A token: its text, the bytes of that, its raw log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None] = []


class ChatLogprobs(BaseModel):
    """Of every token."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    dsbd: Report


class Delta(BaseModel):
    """What a stream adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatCompletionChunk(BaseModel):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    dsbd: Report | None = None


class ChatShape:
    """An AnswerShape."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = asdict(head)

    def whole(
        self, choices: Sequence[AnswerChoice], usage: Usage, report: Report
    ) -> ChatCompletion:
        """See AnswerShape."""
        shaped = [
            ChatChoice(
                index=choice.index,
                message=AnswerMessage(content=choice.text),
                logprobs=_logprobs(choice.tokens),
                finish_reason=choice.finish_reason,  # type: ignore[arg-type]  # pydantic checks it
            )
            for choice in choices
        ]
        return ChatCompletion(**self._head, choices=shaped, usage=usage, dsbd=report)

    def opening(self, index: int) -> ChatCompletionChunk:
        """See AnswerShape."""
        return self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))

    def piece(self, index: int, text: str, tokens: TokenPieces | None) -> ChatCompletionChunk:
        """See AnswerShape."""
        logprobs = _logprobs(tokens)
        return self._chunk(ChunkChoice(index=index, delta=Delta(content=text), logprobs=logprobs))

    def ending(self, index: int, finish_reason: str, report: Report) -> ChatCompletionChunk:
        """See AnswerShape."""
        choice = ChunkChoice(index=index, delta=Delta(), finish_reason=finish_reason)  # type: ignore[arg-type]
        return self._chunk(choice, report)

    def closing(self, usage: Usage) -> ChatCompletionChunk:
        """See AnswerShape."""
        return ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def _chunk(self, choice: ChunkChoice, report: Report | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=[choice], dsbd=report)


def _logprobs(tokens: TokenPieces | None) -> ChatLogprobs | None:
    if tokens is None:
        return None
    return ChatLogprobs(
        content=[
            TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()))
            for text, logprob in zip(tokens.texts, tokens.logprobs, strict=True)
        ]
    )
