"""Engine results to HTTP responses: in one piece, or as server-sent events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dsbd_ort.openai_server.errors import ErrorResponse
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_ort.openai_server.protocol import (
    FINISH_REASONS,
    Report,
    ResponseBuilder,
    ReturnedSequence,
    TokenPieces,
    Usage,
)
from dsbd_ort.results import GeneratedSequence, GenerationResult, StreamPiece
from dsbd_runtime.stream_decoder import TextWindow
from dsbd_runtime.tokenizer import Tokenizer

Results = AsyncIterator[tuple[int, StreamPiece | GenerationResult]]
"""Pieces and results of a plan's engine requests, each with the index of its engine request."""

# A proxy that buffers responses would undo the streaming.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def full_response(
    results: Results, plan: GenerationPlan, builder: ResponseBuilder, tokenizer: Tokenizer | None
) -> BaseModel:
    """Return the response with the best sequences of each prompt.

    Args:
        results: of the plan's engine requests.
        plan: of the HTTP request.
        builder: makes the response of the endpoint.
        tokenizer: given if the response has log-probabilities.
    """
    result_by_index = {
        index: event async for index, event in results if isinstance(event, GenerationResult)
    }
    in_order = [result_by_index[index] for index in range(len(plan.engine_requests))]
    best = _best_of_each_prompt(plan, in_order)
    sequences = [
        ReturnedSequence(
            index=index,
            text=sequence.text,
            finish_reason=FINISH_REASONS[sequence.finish_reason],
            tokens=None if tokenizer is None else _token_pieces(tokenizer, sequence),
        )
        for index, sequence in enumerate(best)
    ]
    usage = _usage(plan, sum(len(sequence.token_ids) for sequence in best))
    return builder.full(sequences, usage, _report(plan, plan.seed, in_order))


def _best_of_each_prompt(
    plan: GenerationPlan, results: list[GenerationResult]
) -> list[GeneratedSequence]:
    """Return ``num_choices`` sequences a prompt, best first."""
    sequences_by_prompt: defaultdict[int, list[GeneratedSequence]] = defaultdict(list)
    for request, result in zip(plan.engine_requests, results, strict=True):
        sequences_by_prompt[request.prompt_index] += result.sequences
    return [
        sequence
        for _, sequences in sorted(sequences_by_prompt.items())
        for sequence in sorted(sequences, key=lambda each: -each.score)[: plan.num_choices]
    ]


class EventStream(StreamingResponse):
    """Sends events; calls ``close`` after the last, or when the client disconnects."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def streamed_events(
    results: Results,
    plan: GenerationPlan,
    builder: ResponseBuilder,
    tokenizer: Tokenizer | None,
    *,
    include_usage: bool,
) -> AsyncIterator[str]:
    """Yield the server-sent events of a response; arguments as those of ``full_response``."""
    choices = _ChoiceStreams(plan, builder, tokenizer)
    num_new_tokens = 0
    try:
        for chunk in choices.first_chunks():
            yield _event(chunk)
        async for index, event in results:
            if isinstance(event, StreamPiece):
                chunks = choices.piece_chunks(index, event)
            else:
                chunks = choices.result_chunks(index, event)
                num_new_tokens += sum(len(each.token_ids) for each in event.sequences)
            for chunk in chunks:
                yield _event(chunk)
        if include_usage:
            yield _event(builder.usage_chunk(_usage(plan, num_new_tokens)))
    except ErrorResponse as error:
        yield f"data: {error.json()}\n\n"
    yield "data: [DONE]\n\n"


class _ChoiceStreams:
    """The chunks of all choices of a stream.

    An engine request that returns one sequence streams it. One that returns several knows none of
    them before it ends: each is then sent as a single chunk.
    """

    def __init__(
        self, plan: GenerationPlan, builder: ResponseBuilder, tokenizer: Tokenizer | None
    ) -> None:
        self._plan = plan
        self._builder = builder
        self._num_each = [r.options.get("num_return_sequences", 1) for r in plan.engine_requests]
        self._tokenizer = tokenizer
        self._texts = [tokenizer and TokenTexts(tokenizer) for _ in range(sum(self._num_each))]

    def first_chunks(self) -> Iterator[BaseModel]:
        """Yield the chunks that begin the choices."""
        for index in range(len(self._texts)):
            chunk = self._builder.first_chunk(index)
            if chunk is not None:
                yield chunk

    def piece_chunks(self, request_index: int, piece: StreamPiece) -> Iterator[BaseModel]:
        """Yield the new text of an engine request, if any."""
        if self._num_each[request_index] > 1:
            return
        index = self._first_choice(request_index)
        texts = self._texts[index]
        tokens = texts.push(piece.token_ids, piece.token_logprobs) if texts else None
        if piece.text or tokens:
            yield self._builder.text_chunk(index, piece.text, tokens)

    def result_chunks(self, request_index: int, result: GenerationResult) -> Iterator[BaseModel]:
        """Yield the chunks that end the choices of an engine request."""
        seed = self._plan.engine_requests[request_index].options["seed"]
        report = _report(self._plan, seed, [result])
        first_choice = self._first_choice(request_index)
        for index, sequence in enumerate(result.sequences, first_choice):
            if self._num_each[request_index] > 1:
                tokens = _token_pieces(self._tokenizer, sequence) if self._tokenizer else None
                yield self._builder.text_chunk(index, sequence.text, tokens)
            elif (texts := self._texts[index]) and (tokens := texts.finish()):
                yield self._builder.text_chunk(index, "", tokens)
            finish_reason = FINISH_REASONS[sequence.finish_reason]
            yield self._builder.last_chunk(index, finish_reason, report)

    def _first_choice(self, request_index: int) -> int:
        return sum(self._num_each[:request_index])


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json()}\n\n"


def _usage(plan: GenerationPlan, num_new_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=plan.num_prompt_tokens,
        completion_tokens=num_new_tokens,
        total_tokens=plan.num_prompt_tokens + num_new_tokens,
    )


def _report(plan: GenerationPlan, seed: int, results: Sequence[GenerationResult]) -> Report:
    requests = [asdict(result.stats) for result in results]
    return Report(seed=seed, strategy=plan.strategy, requests=requests)


class TokenTexts:
    """Texts of a growing sequence's tokens; concatenated they are the text of the sequence.

    A character of several tokens belongs to the last of them, the others have an empty text.
    Tokens are held back until their text is final (see ``stream_decoder``).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = TextWindow()
        self._texts: list[str] = []
        self._logprobs: list[float] = []
        self._run: list[tuple[int, bool]] = []

    def push(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> TokenPieces | None:
        """Append tokens; return those whose text is final now, None if there are none."""
        num_certain = 0
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._add(token_id, logprob)
            if self._window.is_certain:
                num_certain = len(self._texts)
        return self._take(num_certain)

    def finish(self) -> TokenPieces | None:
        """Return the tokens held back, the last with the rest of the text; None if none are."""
        rest = self._window.rest(self._tokenizer)
        rest = self._end_run(rest, is_text=not self._window.unfinished)
        if rest:
            self._texts[-1] += rest
        self._window = TextWindow()
        return self._take(len(self._texts))

    def _take(self, num_tokens: int) -> TokenPieces | None:
        """Return the first ``num_tokens`` of the tokens held back; None for 0."""
        if not num_tokens:
            return None
        pieces = TokenPieces(self._texts[:num_tokens], self._logprobs[:num_tokens])
        self._texts, self._logprobs = self._texts[num_tokens:], self._logprobs[num_tokens:]
        self._run = [(index - num_tokens, completes) for index, completes in self._run]
        return pieces

    def _add(self, token_id: int, logprob: float) -> None:
        before = self._window
        self._window, text = before.extended(self._tokenizer, (token_id,))
        if len(self._window.run) > len(before.run):
            self._run.append((len(self._texts), not self._window.unfinished))
        elif before.run and not self._window.run:
            is_text = not (before.unfinished or self._window.invalid)
            text = self._end_run(text, is_text=is_text)
        self._texts.append(text)
        self._logprobs.append(logprob)

    def _end_run(self, text: str, *, is_text: bool) -> str:
        """Give the byte tokens of an ended run their characters of ``text``; return the rest.

        ``is_text``: whether the run was valid UTF-8; else each of its bytes is one character.
        """
        begin = 0
        for index, completes_character in self._run:
            end = begin + int(completes_character or not is_text)
            self._texts[index] += text[begin:end]
            begin = end
        self._run = []
        return text[begin:]


def _token_pieces(tokenizer: Tokenizer, sequence: GeneratedSequence) -> TokenPieces:
    """Return the tokens of a whole sequence with their texts."""
    texts = TokenTexts(tokenizer)
    parts = (texts.push(sequence.token_ids, sequence.token_logprobs), texts.finish())
    found = [part for part in parts if part is not None]
    return TokenPieces(
        [text for part in found for text in part.texts],
        [logprob for part in found for logprob in part.logprobs],
    )
