"""Request fields and response parts that /v1/completions and /v1/chat/completions share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.decoding.option_values import did_you_mean
from dsbd_ort.openai_server.errors import bad_request

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

# Unsupported fields of OpenAI's, with the values besides null that have no effect: many clients
# always send them. Any other value is an error: ignoring it would silently change the answer.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
_IDENTIFIERS = ("prompt_cache_key", "safety_identifier")  # accepted and unused

FinishReason = Literal["stop", "length"]
FINISH_REASONS: dict[str, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's finish reason by that of a GeneratedSequence."""


def _describe_options(schema: dict[str, Any]) -> None:
    """Add the fields of DecodingConfig, which checks them itself, to the schema of a body."""
    described = TypeAdapter(DecodingConfig).json_schema()["properties"]
    described["strategy"]["enum"] = list(STRATEGIES)
    schema["properties"] = {**described, **schema["properties"]}
    schema["additionalProperties"] = False


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """Request fields of both endpoints; all other fields are those of DecodingConfig."""

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

    def decoding_options(self) -> dict[str, Any]:
        """Return the fields that are options, by the names of DecodingConfig.

        Raises:
            ErrorResponse: a field is unknown or not supported, or contradicts another.
        """
        options = _without_neutral(self.model_extra or {})
        if unknown := sorted(set(options) - OPTION_NAMES):
            known = {*type(self).model_fields, *OPTION_NAMES, *_NEUTRAL_VALUES, *_IDENTIFIERS}
            expected = did_you_mean(unknown[0], known) or "; see docs/serving.md"
            raise bad_request(f"unknown field {unknown[0]!r}{expected}", unknown[0])
        for openai_name, name in OPENAI_NAMES.items():
            value = getattr(self, openai_name)
            if value is None:
                continue
            if name in options and options[name] != value:
                message = f"{openai_name} contradicts another field for {name}; use one of them"
                raise bad_request(message, openai_name)
            options[name] = value
        return options


def _without_neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` without nulls and without unsupported ones whose value has no effect."""
    options = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in _IDENTIFIERS:
            if not isinstance(value, str):
                raise bad_request(f"{name} is not a string; use a string or leave it out", name)
        elif name in _NEUTRAL_VALUES:
            neutral = _NEUTRAL_VALUES[name]
            if not any(_equals_in_json(value, each) for each in neutral):
                allowed = " or ".join(map(repr, neutral)) or "null"
                message = f"this value of {name} is not supported; leave it out or use {allowed}"
                raise bad_request(message, name, "unsupported")
        else:
            options[name] = value
    return options


def _equals_in_json(value: Any, other: Any) -> bool:
    """Return whether two values are equal; true is not 1."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


class Usage(BaseModel):
    """Tokens of the prompts, and of the returned sequences."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Report(BaseModel):
    """The field ``dsbd``: seed and strategy, to reproduce the request, and its statistics.

    ``requests`` are the statistics of each engine request, see docs/run.md.
    """

    seed: int
    strategy: str
    requests: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """The fields of OpenAI's that are the same in a response and in all chunks of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True)
class TokenPieces:
    """Consecutive tokens: their texts, their raw log-probabilities under the target."""

    texts: Sequence[str]
    logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ReturnedSequence:
    """One choice of a response; ``tokens`` is None without ``logprobs`` in the request."""

    index: int
    text: str
    finish_reason: FinishReason
    tokens: TokenPieces | None


class ResponseBuilder(ABC):
    """The response format of one endpoint: a response in one piece, or the chunks of a stream.

    An endpoint says what its choices look like; this class puts them into its response or chunk.

    Attributes:
        response, chunk: the models of the endpoint.
    """

    response: type[BaseModel]
    chunk: type[BaseModel]

    def __init__(self, head: ResponseHead) -> None:
        self._head = asdict(head)

    def full(
        self, sequences: Sequence[ReturnedSequence], usage: Usage, report: Report
    ) -> BaseModel:
        """Return the response without streaming."""
        choices = [self.choice(sequence) for sequence in sequences]
        return self.response(**self._head, choices=choices, usage=usage, dsbd=report)

    def first_chunk(self, index: int) -> BaseModel | None:
        """Return the chunk that begins a choice; None where the endpoint has none."""
        choice = self.first_choice(index)
        return None if choice is None else self.chunk(**self._head, choices=[choice])

    def text_chunk(self, index: int, text: str, tokens: TokenPieces | None) -> BaseModel:
        """Return a chunk with the next text of a choice."""
        return self.chunk(**self._head, choices=[self.text_choice(index, text, tokens)])

    def last_chunk(self, index: int, finish_reason: FinishReason, report: Report) -> BaseModel:
        """Return the chunk that ends a choice."""
        choice = self.last_choice(index, finish_reason)
        return self.chunk(**self._head, choices=[choice], dsbd=report)

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """Return the chunk with the usage, the last of a stream."""
        return self.chunk(**self._head, choices=[], usage=usage)

    @abstractmethod
    def choice(self, sequence: ReturnedSequence) -> BaseModel:
        """Return a whole choice."""

    def first_choice(self, index: int) -> BaseModel | None:
        """Return the choice of the first chunk; None where the endpoint has no such chunk."""
        return None

    @abstractmethod
    def text_choice(self, index: int, text: str, tokens: TokenPieces | None) -> BaseModel:
        """Return the choice of a chunk with text."""

    @abstractmethod
    def last_choice(self, index: int, finish_reason: FinishReason) -> BaseModel:
        """Return the choice of the last chunk."""
