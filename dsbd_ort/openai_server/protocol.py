"""What a client may send: OpenAI's fields by type, and those of DecodingConfig beside them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dsbd_ort.decoding import STRATEGIES, DecodingConfig

PromptField = str | list[str] | list[int] | list[list[int]]


def _describe_options(schema: dict[str, Any]) -> None:
    """Add the fields of DecodingConfig to a body's schema; they are checked by DecodingConfig."""
    described = TypeAdapter(DecodingConfig).json_schema()["properties"]
    described["strategy"]["enum"] = list(STRATEGIES)
    schema["properties"] = {**described, **schema["properties"]}
    schema["additionalProperties"] = False


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """What both routes take; all further fields are those of DecodingConfig."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_describe_options)
    model: str
    n: int | None = Field(None, ge=1)
    num_return_sequences: int | None = Field(None, ge=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    def further_fields(self) -> dict[str, Any]:
        """Return what was given beyond the fields above, nulls left out."""
        return {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: PromptField
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = None


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message; fields beyond these must be null."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **name}


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None


OPENAI_NAMES = {  # OpenAI's name: that of DecodingConfig
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop": "stop_strings",
    "num_return_sequences": "num_return_sequences",
    "n": "num_return_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
}
OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(DecodingConfig))
