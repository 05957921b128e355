"""Request fields and response parts that /v1/completions and /v1/chat/completions share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dsbd_ort.decoding import STRATEGIES, DecodingOptions
from dsbd_ort.decoding.drafting.prediction import Prediction
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.decoding.option_values import did_you_mean
from dsbd_ort.openai_server.bodies import Entries
from dsbd_ort.openai_server.errors import ErrorResponse, bad_request
from dsbd_ort.openai_server.request_fields import FIELDS, without_neutral
from dsbd_ort.openai_server.structured import ConstraintFields
from dsbd_ort.requests.prompts import LANGUAGE_OPTIONS
from dsbd_ort.requests.results import GeneratedSequence

OPTION_NAMES = frozenset(name for name, row in OPTION_TABLE.items() if row.http is not None) | {
    *LANGUAGE_OPTIONS
}

_OPTION_BY_FIELD = {
    **{other: name for name, row in OPTION_TABLE.items() for other in row.http or ()},
    **{name: name for name in OPTION_NAMES},
}

_NAMES_OF_OPTIONS = (
    *((name, other) for other, name in _OPTION_BY_FIELD.items()),
    *(("eos_token_id", other) for other in ("stop_token_ids", "ignore_eos")),
    *((name, "prediction") for name in ("predicted_text", "predicted_token_ids")),
    *(("num_return_sequences", other) for other in ("n", "best_of")),
    *(("top_logprobs", "logprobs"), ("prompt_logprobs", "echo"), ("prompt", "messages")),
    *(("constraint", other) for other in (*ConstraintFields.model_fields, "tools")),
)
"""Pairs of an option that errors name and a field that may have set it, in order of preference."""
_WORDS = ("prompt", "constraint")  # ordinary words, not names, in the text of an error
_NAME = re.compile(r"\w+(\.\w+)*")

FinishReason = Literal["stop", "length", "tool_calls"]
FINISH_REASONS: dict[str, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's finish reason by the finish reason of a GeneratedSequence."""


def with_names(error: ErrorResponse, names: Mapping[str, str]) -> ErrorResponse:
    """Return an error with fields renamed, in its text and in ``param``."""
    texts = {name: other for name, other in names.items() if name not in _WORDS}
    message = _NAME.sub(lambda match: texts.get(match[0], match[0]), error.message)
    param = error.param or ""
    first = names.get(param.partition(".")[0], error.param)
    return replace(error, message=message, param=names.get(param, first))


def _describe_options(schema: dict[str, Any]) -> None:
    """Add the options, which DecodingConfig checks, to the schema of a body."""
    hints = get_type_hints(DecodingOptions)
    described: dict[str, Any] = {}
    for name, row in OPTION_TABLE.items():
        if row.http is not None:
            described[name] = TypeAdapter(hints[name]).json_schema()
            described[name]["default"] = None if callable(row.default) else row.default
    described["strategy"]["enum"] = list(STRATEGIES)
    described |= {name: {"type": "string"} for name in LANGUAGE_OPTIONS}
    schema["properties"] = {**described, **schema["properties"]}
    schema["additionalProperties"] = False


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``; ``continuous_usage_stats`` is vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class PredictedPart(BaseModel):
    """A part of a predicted text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class PredictedContent(BaseModel):
    """OpenAI's ``prediction``: a text that the answer is expected to repeat, except for edits."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["content"]
    content: str | Entries[PredictedPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class GenerationBody(ConstraintFields):
    """Request fields of both endpoints; any other field is an option of DecodingConfig."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_describe_options)
    model: str
    n: int | None = Field(None, ge=1)
    num_return_sequences: int | None = Field(None, ge=1)
    use_beam_search: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Entries[str] | None = None
    stop_token_ids: Entries[int] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: PredictedContent | None = None

    @property
    def has_media(self) -> bool:
        """Whether the prompt has sounds or pictures."""
        return False

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most probable tokens to return at each position; None: no log-probabilities."""
        raise NotImplementedError

    def own_error(self, error: ErrorResponse) -> ErrorResponse:
        """Return an error with the names of the fields that this request has."""
        sent = {name for name in self.model_fields_set if getattr(self, name) is not None}
        names: dict[str, str] = {}
        for option, field in _NAMES_OF_OPTIONS:
            if field in sent and option not in sent:
                names.setdefault(option, field)
        return with_names(error, names)

    def decoding_options(self) -> dict[str, Any]:
        """Return the fields that are options, under their names in DecodingConfig.

        The planner handles ``n``, the end-of-sequence tokens and log-probabilities.
        ErrorResponse: a field is unknown or not supported, or contradicts another field.
        """
        options = without_neutral(self.model_extra or {})
        if unknown := sorted(set(options) - OPTION_NAMES):
            names = {*type(self).model_fields, *OPTION_NAMES, *FIELDS}
            expected = did_you_mean(unknown[0], names) or "; see docs/serving_reference.md"
            raise bad_request(f"unknown field {unknown[0]!r}{expected}", unknown[0])
        for openai_name in type(self).model_fields:
            value = getattr(self, openai_name)
            if value is None or openai_name not in _OPTION_BY_FIELD:
                continue
            name = _OPTION_BY_FIELD[openai_name]
            if name in options and options[name] != value:
                message = f"{openai_name} contradicts another field for {name}; use one of them"
                raise bad_request(message, openai_name)
            options[name] = value
        if self.prediction is not None:
            if other := next((n for n in options if n.startswith("predicted_")), None):
                raise bad_request(f"prediction contradicts {other}; use one of them", "prediction")
            options["predicted_text"] = self.prediction.text
        return options


def absent_if_none() -> Any:
    """Return the declaration of a field that is left out of the JSON if it is None.

    OpenAI's Python client merges the events of a stream and would take null for a value.
    """
    return Field(None, exclude_if=lambda value: value is None)


class CompletionTokensDetails(BaseModel):
    """Counts of predicted tokens: those in the returned sequences, and all others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int

    @classmethod
    def of(
        cls, predicted_ids: Sequence[int], outputs: Sequence[Sequence[int]]
    ) -> CompletionTokensDetails | None:
        """Return the counts over all outputs; None without a prediction or an output."""
        if not (predicted_ids and outputs):
            return None
        prediction = Prediction(predicted_ids)
        num_accepted = sum(map(prediction.num_repeated, outputs))
        return cls(
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=len(predicted_ids) * len(outputs) - num_accepted,
        )


class PromptTokensDetails(BaseModel):
    """Number of prompt tokens whose cache rows earlier requests have computed."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens in the prompts and in the returned sequences."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = absent_if_none()
    completion_tokens_details: CompletionTokensDetails | None = absent_if_none()


class Report(BaseModel):
    """The field ``dsbd``: seed and strategy, to reproduce the request, and its statistics.

    ``requests`` has the seed and the statistics of each engine request; see docs/run.md.
    """

    seed: int
    strategy: str
    requests: list[dict[str, Any]]


class ChoiceReport(BaseModel):
    """The field ``dsbd`` of a choice: its score, and with a trie its token ids and items.

    ``score`` is ``logprob`` / new tokens ** length_penalty; ``items`` is null without items.
    """

    score: float
    logprob: float
    token_ids: list[int] | None = None
    items: list[Any] | None = None

    @classmethod
    def of(cls, sequence: GeneratedSequence, *, names_tokens: bool) -> ChoiceReport:
        return cls(
            score=sequence.score,
            logprob=sequence.logprob,
            token_ids=sequence.token_ids if names_tokens else None,
            items=sequence.items,
        )


class ResponseHead(BaseModel):
    """OpenAI's fields that are equal in all chunks of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True)
class ScoredToken:
    """A token and its log-probability under the target; None for the first token of a prompt.

    name: its text; if it is a part of a character, its escaped bytes.
    """

    name: str
    content: bytes
    logprob: float | None


@dataclass(frozen=True)
class TokenPieces:
    """Consecutive tokens, and the text that each adds.

    tops: for each token the most probable tokens at its position; None for the first token of a
        prompt, and for all tokens if the request does not ask for them.
    """

    texts: Sequence[str]
    tokens: Sequence[ScoredToken]
    tops: Sequence[Sequence[ScoredToken] | None]


class ResponseBuilder:
    """The response format of one endpoint: a response in one piece, or the chunks of a stream.

    An endpoint makes the choices: with ``choice``, or for chunks with ``first_choice``,
    ``text_choice`` and ``last_choice``. This class puts them into a response or a chunk.
    """

    response: type[BaseModel]
    chunk: type[BaseModel]
    end = "data: [DONE]\n\n"  # last event of a stream

    def __init__(self, head: ResponseHead) -> None:
        self._head = head.model_dump()

    def full(self, choices: Sequence[BaseModel], usage: Usage, report: Report) -> BaseModel:
        return self.response(**self._head, choices=choices, usage=usage, dsbd=report)

    def event(
        self, *choices: BaseModel, usage: Usage | None = None, report: Report | None = None
    ) -> str:
        """Return a server-sent event: a chunk with these choices and the usage so far."""
        chunk = self.chunk(**self._head, choices=choices, usage=usage, dsbd=report)
        return f"data: {chunk.model_dump_json()}\n\n"

    def error_event(self, error: ErrorResponse) -> str:
        """Return the event of a stream that fails."""
        return f"data: {error.json()}\n\n"

    def first_choice(self, index: int) -> BaseModel | None:
        """Return the choice of the first chunk; None if the endpoint has no such chunk."""
        return None
