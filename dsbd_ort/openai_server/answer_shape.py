"""What an answer is made of before it takes the shape of a route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from dsbd_ort.decoding import DecodingStats
from dsbd_ort.openai_server.planner import GenerationPlan


class Usage(BaseModel):
    """Tokens read, and tokens of the returned sequences."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Report(BaseModel):
    """The field ``dsbd``: what repeats the request, and what its engine requests cost.

    ``requests`` are the statistics of docs/run.md.
    """

    seed: int
    strategy: str
    requests: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """What all parts of an answer share; see OpenAI's fields of these names."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True)
class TokenPieces:
    """Tokens one after another: their texts, their raw log-probabilities under the target."""

    texts: Sequence[str]
    logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class AnswerChoice:
    """A returned sequence; ``tokens`` is None where nobody asked for log-probabilities."""

    index: int
    text: str
    finish_reason: str
    tokens: TokenPieces | None


class AnswerShape(Protocol):
    """One route's way to say it."""

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage, report: Report) -> BaseModel:
        """Return the answer in one piece."""

    def opening(self, index: int) -> BaseModel | None:
        """Return what begins a choice's stream, None where nothing does."""

    def piece(self, index: int, text: str, tokens: TokenPieces | None) -> BaseModel:
        """Return the next text of a choice."""

    def ending(self, index: int, finish_reason: str, report: Report) -> BaseModel:
        """Return what ends a choice's stream."""

    def closing(self, usage: Usage) -> BaseModel:
        """Return what tells the usage at the end of a stream."""


def usage_of(plan: GenerationPlan, num_new_tokens: int) -> Usage:
    """Return the usage of a whole request."""
    return Usage(
        prompt_tokens=plan.num_prompt_tokens,
        completion_tokens=num_new_tokens,
        total_tokens=plan.num_prompt_tokens + num_new_tokens,
    )


def report_of(seed: int, strategy: str, stats: Sequence[DecodingStats]) -> Report:
    """Return the field ``dsbd`` of engine requests."""
    return Report(seed=seed, strategy=strategy, requests=[asdict(each) for each in stats])
