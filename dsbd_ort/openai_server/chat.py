"""Request and response of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.protocol import (
    FinishReason,
    GenerationBody,
    Report,
    ResponseHead,
    ReturnedSequence,
    TokenPieces,
    Usage,
)


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of the request; fields beyond these must be empty."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **name}


class ChatBody(GenerationBody):
    """The request."""

    messages: list[ChatMessage]
    logprobs: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return bool(self.logprobs)

    def template_messages(self) -> list[dict[str, str]]:
        """Return the messages as a chat template reads them.

        Raises:
            ErrorResponse: one has more than role, content and name, such as tool calls.
        """
        for index, message in enumerate(self.messages):
            for name, value in (message.model_extra or {}).items():
                if value not in (None, [], ""):
                    field = f"messages.{index}.{name}"
                    reason = f"{field} is not supported; use role, content and name only"
                    raise bad_request(reason, field, "unsupported")
        return [message.for_template() for message in self.messages]


class TokenLogprob(BaseModel):
    """Text, UTF-8 bytes and raw log-probability of one token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None] = []


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of a choice, or of a chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    """The message that the model generated."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One returned sequence."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The response in one piece."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    dsbd: Report


class Delta(BaseModel):
    """The addition of a chunk to the message of its choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """The choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    dsbd: Report | None = None


class ChatBuilder:
    """The ResponseBuilder of the endpoint."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = asdict(head)

    def full(
        self, sequences: Sequence[ReturnedSequence], usage: Usage, report: Report
    ) -> ChatCompletion:
        """See ResponseBuilder."""
        choices = [
            ChatChoice(
                index=each.index,
                message=AssistantMessage(content=each.text),
                logprobs=_logprobs(each.tokens),
                finish_reason=each.finish_reason,
            )
            for each in sequences
        ]
        return ChatCompletion(**self._head, choices=choices, usage=usage, dsbd=report)

    def first_chunk(self, index: int) -> ChatCompletionChunk:
        """See ResponseBuilder."""
        return self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))

    def text_chunk(self, index: int, text: str, tokens: TokenPieces | None) -> ChatCompletionChunk:
        """See ResponseBuilder."""
        logprobs = _logprobs(tokens)
        return self._chunk(ChunkChoice(index=index, delta=Delta(content=text), logprobs=logprobs))

    def last_chunk(
        self, index: int, finish_reason: FinishReason, report: Report
    ) -> ChatCompletionChunk:
        """See ResponseBuilder."""
        choice = ChunkChoice(index=index, delta=Delta(), finish_reason=finish_reason)
        return self._chunk(choice, report)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """See ResponseBuilder."""
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
