"""Request and response of /v1/completions."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from pydantic import BaseModel, Field

from dsbd_ort.decoding.option_table import MOST_TOP_LOGPROBS
from dsbd_ort.openai_server.bodies import Entries
from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.protocol import (
    ChoiceReport,
    FinishReason,
    GenerationBody,
    Report,
    ResponseBuilder,
    ResponseHead,
    ScoredToken,
    TokenPieces,
    Usage,
    absent_if_none,
)


class CompletionBody(GenerationBody):
    """The request."""

    prompt: str | Entries[str] | Entries[int] | Entries[Entries[int]]
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids; raise ErrorResponse for an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("prompt is an empty list; expected a text or token ids", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class CompletionLogprobs(BaseModel):
    """Text, raw log-probability and text offset of each token.

    ``top_logprobs``: the most probable tokens at the same position, and the token itself; None
    unless requested.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One returned sequence, or the next part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    dsbd: ChoiceReport | None = absent_if_none()


class Completion(ResponseHead):
    """The response, or one event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = absent_if_none()
    dsbd: Report | None = absent_if_none()


class CompletionBuilder(ResponseBuilder):
    """The ResponseBuilder of the endpoint."""

    response = chunk = Completion

    def __init__(self, head: ResponseHead) -> None:
        super().__init__(head)
        self._offset_by_index: dict[int, int] = {}

    def choice(
        self,
        index: int,
        text: str,
        tokens: TokenPieces | None,
        finish_reason: FinishReason | None = None,
        report: ChoiceReport | None = None,
    ) -> CompletionChoice:
        """See ResponseBuilder; a chunk with text has no ``finish_reason`` and no ``report``."""
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, tokens),
            finish_reason=finish_reason,
            dsbd=report,
        )

    text_choice = choice

    def last_choice(
        self, index: int, finish_reason: FinishReason, report: ChoiceReport
    ) -> CompletionChoice:
        return CompletionChoice(index=index, text="", finish_reason=finish_reason, dsbd=report)

    def _logprobs(self, index: int, tokens: TokenPieces | None) -> CompletionLogprobs | None:
        """Return the next log-probabilities of a choice; its text offsets go on from the last."""
        if tokens is None:
            return None
        begin = self._offset_by_index.get(index, 0)
        *offsets, end = accumulate(map(len, tokens.texts), initial=begin)
        self._offset_by_index[index] = end
        tops = [_with_chosen(*each) for each in zip(tokens.tops, tokens.tokens, strict=True)]
        return CompletionLogprobs(
            tokens=list(tokens.texts),
            token_logprobs=[token.logprob for token in tokens.tokens],
            top_logprobs=tops if any(tops) else None,
            text_offset=offsets,
        )


def _with_chosen(top: Sequence[ScoredToken] | None, chosen: ScoredToken) -> dict[str, float] | None:
    if top is None:
        return None
    logprob_by_name: dict[str, float] = {}
    for token in (*top, chosen):
        if token.logprob is not None:
            logprob_by_name.setdefault(token.name, token.logprob)
    return logprob_by_name
