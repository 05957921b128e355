"""Request and response of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsbd_ort.decoding.option_table import MOST_TOP_LOGPROBS
from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.protocol import (
    FinishReason,
    GenerationBody,
    Report,
    ResponseBuilder,
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
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """See GenerationBody."""
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs true"
            raise bad_request(message, "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

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


class TopLogprob(BaseModel):
    """Text, UTF-8 bytes and raw log-probability of one token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token, and the most probable ones in its place."""

    top_logprobs: list[TopLogprob]


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


class ChatBuilder(ResponseBuilder):
    """The ResponseBuilder of the endpoint."""

    response = ChatCompletion
    chunk = ChatCompletionChunk

    def choice(self, sequence: ReturnedSequence) -> ChatChoice:
        """See ResponseBuilder."""
        return ChatChoice(
            index=sequence.index,
            message=AssistantMessage(content=sequence.text),
            logprobs=_logprobs(sequence.tokens),
            finish_reason=sequence.finish_reason,
        )

    def first_choice(self, index: int) -> ChunkChoice:
        """See ResponseBuilder."""
        return ChunkChoice(index=index, delta=Delta(role="assistant", content=""))

    def text_choice(self, index: int, text: str, tokens: TokenPieces | None) -> ChunkChoice:
        """See ResponseBuilder."""
        return ChunkChoice(index=index, delta=Delta(content=text), logprobs=_logprobs(tokens))

    def last_choice(self, index: int, finish_reason: FinishReason) -> ChunkChoice:
        """See ResponseBuilder."""
        return ChunkChoice(index=index, delta=Delta(), finish_reason=finish_reason)


def _logprobs(tokens: TokenPieces | None) -> ChatLogprobs | None:
    if tokens is None:
        return None
    return ChatLogprobs(
        content=[
            TokenLogprob(**_told(text, logprob), top_logprobs=[_top(*each) for each in top or ()])
            for text, logprob, top in zip(tokens.texts, tokens.logprobs, tokens.tops, strict=True)
        ]
    )


def _top(text: str, logprob: float) -> TopLogprob:
    return TopLogprob(**_told(text, logprob))


def _told(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
