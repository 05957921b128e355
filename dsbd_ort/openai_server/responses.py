"""An answer as server-sent events: text as soon as it is certain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dsbd_ort.generated import GenerationResult, StreamStep
from dsbd_ort.openai_server.answer_shape import AnswerShape, report_of, usage_of
from dsbd_ort.openai_server.finish_reason import openai_finish_reason
from dsbd_ort.openai_server.generation import Generation
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_ort.openai_server.refusal import Refusal
from dsbd_ort.openai_server.token_texts import TokenTexts
from dsbd_ort.openai_server.whole_answer import token_pieces
from dsbd_runtime.tokenizer import Tokenizer

# A proxy that gathers what passes through it would undo the streaming.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Sends events; calls ``close`` when they are over, or when their reader has gone."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def streamed_answer(
    generation: Generation,
    plan: GenerationPlan,
    shape: AnswerShape,
    *,
    tokenizer: Tokenizer | None,
    include_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events of a request that was submitted; see ``whole_answer``."""
    choices = _Choices(plan, shape, tokenizer)
    num_new_tokens = 0
    try:
        for part in choices.openings():
            yield _event(part)
        async for index, event in generation.events():
            if isinstance(event, StreamStep):
                parts = choices.step(index, event)
            else:
                parts = choices.result(index, event)
                num_new_tokens += sum(len(each.token_ids) for each in event.sequences)
            for part in parts:
                yield _event(part)
        if include_usage:
            yield _event(shape.closing(usage_of(plan, num_new_tokens)))
    except Refusal as error:
        yield f"data: {error.json()}\n\n"
    yield "data: [DONE]\n\n"


class _Choices:
    """The parts of all choices' streams.

    A submission of one sequence streams it; of several nothing is certain before the end, where
    each comes in one piece.
    """

    def __init__(
        self, plan: GenerationPlan, shape: AnswerShape, tokenizer: Tokenizer | None
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._num_each = [s.options.get("num_return_sequences", 1) for s in plan.submissions]
        self._tokenizer = tokenizer
        self._texts = [tokenizer and TokenTexts(tokenizer) for _ in range(sum(self._num_each))]

    def openings(self) -> Iterator[BaseModel]:
        """Yield what begins the choices."""
        for index in range(len(self._texts)):
            part = self._shape.opening(index)
            if part is not None:
                yield part

    def step(self, submission: int, step: StreamStep) -> Iterator[BaseModel]:
        """Yield what a step adds."""
        if self._num_each[submission] > 1:
            return
        index = self._first_choice(submission)
        texts = self._texts[index]
        tokens = texts.push(step.token_ids, step.token_logprobs) if texts else None
        if step.text or tokens:
            yield self._shape.piece(index, step.text, tokens)

    def result(self, submission: int, result: GenerationResult) -> Iterator[BaseModel]:
        """Yield what ends the choices of a submission."""
        options = self._plan.submissions[submission].options
        report = report_of(options["seed"], self._plan.strategy, [result.stats])
        first = self._first_choice(submission)
        for index, sequence in enumerate(result.sequences, first):
            if self._num_each[submission] > 1:
                tokens = token_pieces(self._tokenizer, sequence) if self._tokenizer else None
                yield self._shape.piece(index, sequence.text, tokens)
            elif (texts := self._texts[index]) and (tokens := texts.finish()):
                yield self._shape.piece(index, "", tokens)
            reason = openai_finish_reason(sequence.finish_reason)
            yield self._shape.ending(index, reason, report)

    def _first_choice(self, submission: int) -> int:
        return sum(self._num_each[:submission])


def _event(part: BaseModel) -> str:
    return f"data: {part.model_dump_json()}\n\n"
