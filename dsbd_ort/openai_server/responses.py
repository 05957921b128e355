"""Engine results to HTTP responses: texts of tokens, responses in one piece, server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dsbd_ort.decoding.top_tokens import PromptLogprobs, TokenLogprobs
from dsbd_ort.openai_server.chat import ChatBuilder
from dsbd_ort.openai_server.completions import CompletionBuilder
from dsbd_ort.openai_server.errors import ErrorResponse
from dsbd_ort.openai_server.item_responses import ItemResponseBuilder
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_ort.openai_server.protocol import (
    FINISH_REASONS,
    ChoiceReport,
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    Report,
    ScoredToken,
    StreamOptions,
    TokenPieces,
    Usage,
)
from dsbd_ort.requests.results import GeneratedSequence, GenerationResult, StreamPiece
from dsbd_runtime.text.stream_decoder import TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer

_FEW_TOKENS = 16  # making the chunks of so many tokens takes a few milliseconds at most
LEAST_LOGPROB = -9999.0
"""Log-probability of an impossible token, as OpenAI returns it: JSON has no infinity."""

Tops = Sequence[TokenLogprobs | None]
Scored = tuple[Sequence[int], Sequence[float | None], Tops | None]
"""Tokens, their log-probabilities, and the most probable tokens at their positions."""


class TokenTexts:
    """Texts of a growing sequence's tokens; concatenated they are the text of the sequence.

    A character that several tokens spell belongs to the last one; the others' texts are empty.
    Tokens are held back until their text is final (see ``stream_decoder``).
    """

    def __init__(self, start: TextWindow) -> None:
        """Begin at ``start``: after the prompt, or before it if it is echoed."""
        self._window = start
        self._texts: list[str] = []
        self._tokens: list[ScoredToken] = []
        self._tops: list[list[ScoredToken] | None] = []
        self._run: list[tuple[int, bool]] = []

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Tops | None = None
    ) -> TokenPieces | None:
        """Append tokens; return the tokens whose text became final, or None."""
        num_certain = 0
        of_each = [None] * len(token_ids) if tops is None else tops
        for token_id, logprob, top in zip(token_ids, logprobs, of_each, strict=True):
            self._add(token_id)
            self._tokens.append(self._scored(token_id, logprob))
            self._tops.append(None if top is None else [self._scored(*each) for each in top])
            if self._window.is_certain:
                num_certain = len(self._texts)
        return self._take(num_certain)

    def finish(self) -> TokenPieces | None:
        """Return the tokens held back, the last one with the rest of the text; None if no token."""
        rest = self._end_run(self._window.rest(), is_text=not self._window.unfinished)
        if self._texts:
            self._texts[-1] += rest
        return self._take(len(self._texts))

    def _take(self, num_tokens: int) -> TokenPieces | None:
        if not num_tokens:
            return None
        columns = self._texts, self._tokens, self._tops
        pieces = TokenPieces(*(column[:num_tokens] for column in columns))  # type: ignore[arg-type]
        for column in columns:
            del column[:num_tokens]
        self._run = [(index - num_tokens, completes) for index, completes in self._run]
        return pieces

    def _add(self, token_id: int) -> None:
        before = self._window
        self._window, text = before.extended((token_id,))
        if len(self._window.run) > len(before.run):
            self._run.append((len(self._texts), not self._window.unfinished))
        elif before.run and not self._window.run:
            is_text = not (before.unfinished or self._window.invalid)
            text = self._end_run(text, is_text=is_text)
        self._texts.append(text)

    def _end_run(self, text: str, *, is_text: bool) -> str:
        """Assign the characters of ``text`` to the byte tokens of an ended run; return the rest.

        is_text: whether the run was valid UTF-8; if not, each of its bytes is one character.
        """
        begin = 0
        for index, completes_character in self._run:
            end = begin + int(completes_character or not is_text)
            self._texts[index] += text[begin:end]
            begin = end
        self._run = []
        return text[begin:]

    def _scored(self, token_id: int, logprob: float | None) -> ScoredToken:
        tokenizer = self._window.tokenizer
        logprob = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return ScoredToken(tokenizer.name_of(token_id), tokenizer.bytes_of(token_id), logprob)


def pieces_of(start: TextWindow, *parts: Scored) -> TokenPieces:
    """Return the tokens of a whole text that begins at ``start`` and is given in parts."""
    texts = TokenTexts(start)
    pieces = [*(texts.push(*part) for part in parts), texts.finish()]
    nonempty = [each for each in pieces if each is not None]
    return TokenPieces(
        [text for each in nonempty for text in each.texts],
        [token for each in nonempty for token in each.tokens],
        [top for each in nonempty for top in each.tops],
    )


Builder = ChatBuilder | CompletionBuilder | ItemResponseBuilder
Results = AsyncIterator[tuple[int, StreamPiece | GenerationResult]]
"""Pieces and results of a plan's engine requests, each with the index of its engine request."""

# A proxy that buffers responses would undo the streaming.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def full_response(
    results: Results, plan: GenerationPlan, builder: Builder, tokenizer: Tokenizer | None
) -> str:
    """Return the best sequences of each prompt as JSON, made in a thread: it may take seconds.

    tokenizer: given if the response has log-probabilities.
    """
    result_by_index = {
        index: event async for index, event in results if isinstance(event, GenerationResult)
    }
    in_order = [result_by_index[index] for index in range(len(plan.configs))]
    return await asyncio.to_thread(_whole, in_order, plan, builder, tokenizer)


def _whole(
    in_order: Sequence[GenerationResult],
    plan: GenerationPlan,
    builder: Builder,
    tokenizer: Tokenizer | None,
) -> str:
    choices: list[BaseModel] = []
    num_new_tokens, returned = 0, list[GeneratedSequence]()
    for prompt_index, prompt_ids in enumerate(plan.prompts):
        of_prompt = in_order[prompt_index * plan.num_samples :][: plan.num_samples]
        scored = of_prompt[0].prompt_logprobs
        first = prompt_index * plan.num_choices * plan.num_copies  # even if fewer are returned
        for index, sequence in enumerate(_returned(plan, of_prompt), first):
            num_new_tokens += 0 if plan.drops_new_tokens else len(sequence.token_ids)
            returned.append(sequence)
            tokens = None
            if tokenizer is not None:
                tokens = _choice_pieces(plan, prompt_ids, sequence, scored, tokenizer)
            echo = plan.echoes[prompt_index] if plan.echoes else ""
            text = echo if plan.drops_new_tokens else echo + sequence.text
            rank = ChoiceReport.of(sequence, names_tokens=plan.names_tokens)
            finish_reason = _finish_reason(plan, sequence)
            choices.append(builder.choice(index, text, tokens, finish_reason, rank))
    num_cached = sum(each.stats.num_cached_tokens for each in in_order[:: plan.num_samples])
    usage = _usage(plan, num_new_tokens, returned, num_cached)
    return builder.full(choices, usage, _report(plan, plan.seed(), in_order)).model_dump_json()


def _returned(plan: GenerationPlan, results: Sequence[GenerationResult]) -> list[GeneratedSequence]:
    sequences = [sequence for result in results for sequence in result.sequences]
    if plan.is_ranked:
        sequences = sorted(sequences, key=lambda each: -each.score)[: plan.num_choices]
    return [sequence for sequence in sequences for _ in range(plan.num_copies)]


def _finish_reason(plan: GenerationPlan, sequence: GeneratedSequence) -> FinishReason:
    return "length" if plan.drops_new_tokens else FINISH_REASONS[sequence.finish_reason]


def _choice_pieces(
    plan: GenerationPlan,
    prompt_ids: Sequence[int],
    sequence: GeneratedSequence,
    scored: PromptLogprobs | None,
    tokenizer: Tokenizer,
) -> TokenPieces:
    """Return the tokens of a choice: with ``scored`` the prompt's tokens, then the new tokens.

    Both are one text: a character that begins in the prompt belongs to the token that ends it.
    """
    if scored is None:
        return pieces_of(TextWindow.after(tokenizer, prompt_ids), _new_tokens(sequence))
    parts: list[Scored] = [(prompt_ids, scored.token_logprobs, scored.top_logprobs)]
    if not plan.drops_new_tokens:
        parts.append(_new_tokens(sequence))
    return pieces_of(TextWindow(tokenizer), *parts)


def _new_tokens(sequence: GeneratedSequence) -> Scored:
    return sequence.token_ids, sequence.token_logprobs, sequence.top_logprobs


class EventStream(StreamingResponse):
    """Sends events; calls ``close`` after the last one, or when the client disconnects."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def streamed_events(
    results: Results,
    plan: GenerationPlan,
    builder: Builder,
    tokenizer: Tokenizer | None,
    options: StreamOptions,
    named: Callable[[ErrorResponse], ErrorResponse],
) -> AsyncIterator[str]:
    """Yield the server-sent events of a response; the arguments are those of ``full_response``.

    named: returns an error with the names of the client's fields.
    """
    choices = _ChoiceStreams(plan, builder, tokenizer, bool(options.continuous_usage_stats))
    try:
        for chunk in choices.first_chunks():
            yield chunk
        async for index, event in results:
            if isinstance(event, StreamPiece):
                chunks = choices.piece_chunks(index, event)
                may_take_long = len(event.token_ids) > _FEW_TOKENS
            else:
                chunks = choices.result_chunks(index, event)
                may_take_long = True
            for chunk in await asyncio.to_thread(list, chunks) if may_take_long else chunks:
                yield chunk
        if options.include_usage:
            counts = choices.num_new_tokens, choices.returned, choices.num_cached_tokens
            usage = await asyncio.to_thread(_usage, plan, *counts)
            yield builder.event(usage=usage)
    except ErrorResponse as error:
        yield builder.error_event(named(error))
    yield builder.end


class _ChoiceStreams:
    """The chunks of all choices of a stream.

    An engine request that returns one sequence streams it, once for every copy. If it returns
    several, the sequences and their number are known only at the end: each is then sent whole.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        builder: Builder,
        tokenizer: Tokenizer | None,
        has_usage: bool,
    ) -> None:
        """``has_usage``: whether every chunk has the usage so far."""
        self._plan = plan
        self._builder = builder
        self._has_usage = has_usage
        self._num_each: list[int] = [
            config.num_return_sequences * plan.num_copies for config in plan.configs
        ]
        self._starts = [
            tokenizer and TextWindow.after(tokenizer, prompt_ids)
            for prompt_ids in plan.prompts
            for _ in range(plan.num_samples)
        ]
        self._texts = [start and TokenTexts(start) for start in self._starts]
        self.num_new_tokens = self.num_cached_tokens = 0
        self.returned: list[GeneratedSequence] = []

    def first_chunks(self) -> Iterator[str]:
        """Yield the chunks that begin the choices of requests that return one sequence."""
        for request_index in range(len(self._plan.configs)):
            if self._is_streamed(request_index):
                for index in self._choices(request_index):
                    yield from self._begin(request_index, index)

    def _begin(self, request_index: int, index: int) -> Iterator[str]:
        choice = self._builder.first_choice(index)
        if choice is not None:
            yield self._builder.event(choice)
        if self._plan.echoes:
            yield self._text(index, self._plan.echoes[self._plan.prompt_index(request_index)], None)

    def _text(self, index: int, text: str, tokens: TokenPieces | None) -> str:
        choice = self._builder.text_choice(index, text, tokens)
        return self._builder.event(choice, usage=self._usage())

    def piece_chunks(self, request_index: int, piece: StreamPiece) -> Iterator[str]:
        if not self._is_streamed(request_index) or self._plan.drops_new_tokens:
            return
        self.num_new_tokens += len(piece.token_ids) * self._plan.num_copies
        texts = self._texts[request_index]
        tokens = None
        if texts:
            tokens = texts.push(piece.token_ids, piece.token_logprobs, piece.top_logprobs)
        if piece.text or tokens:
            for index in self._choices(request_index):
                yield self._text(index, piece.text, tokens)

    def result_chunks(self, request_index: int, result: GenerationResult) -> Iterator[str]:
        report = _report(self._plan, self._plan.seed(request_index), [result])
        texts = self._texts[request_index]
        rest = texts.finish() if texts else None
        sequences = [each for each in result.sequences for _ in range(self._plan.num_copies)]
        self.returned += sequences
        if request_index % self._plan.num_samples == 0:  # samples share their prompt
            self.num_cached_tokens += result.stats.num_cached_tokens
        # Processors or a constraint may leave fewer sequences than beams.
        for index, sequence in zip(self._choices(request_index), sequences, strict=False):
            if not self._is_streamed(request_index):
                yield from self._begin(request_index, index)
            if self._plan.drops_new_tokens:
                pass
            elif not self._is_streamed(request_index):
                self.num_new_tokens += len(sequence.token_ids)
                start = self._starts[request_index]
                tokens = pieces_of(start, _new_tokens(sequence)) if start else None
                yield self._text(index, sequence.text, tokens)
            elif rest:
                yield self._text(index, "", rest)
            rank = ChoiceReport.of(sequence, names_tokens=self._plan.names_tokens)
            finish_reason = _finish_reason(self._plan, sequence)
            choice = self._builder.last_choice(index, finish_reason, rank)
            yield self._builder.event(choice, report=report)

    def _is_streamed(self, request_index: int) -> bool:
        return self._num_each[request_index] == self._plan.num_copies

    def _choices(self, request_index: int) -> range:
        first = sum(self._num_each[:request_index])
        return range(first, first + self._num_each[request_index])

    def _usage(self) -> Usage | None:
        return _usage(self._plan, self.num_new_tokens) if self._has_usage else None


def _usage(
    plan: GenerationPlan,
    num_new_tokens: int,
    returned: Sequence[GeneratedSequence] = (),
    num_cached: int = 0,
) -> Usage:
    """Return the usage; ``returned``: the returned sequences that have ended."""
    return Usage(
        prompt_tokens=plan.num_prompt_tokens,
        completion_tokens=num_new_tokens,
        total_tokens=plan.num_prompt_tokens + num_new_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached) if num_cached else None,
        completion_tokens_details=CompletionTokensDetails.of(
            plan.configs[0].predicted_token_ids, [sequence.token_ids for sequence in returned]
        ),
    )


def _report(plan: GenerationPlan, seed: int, results: Sequence[GenerationResult]) -> Report:
    requests = [{"seed": result.seed, **asdict(result.stats)} for result in results]
    return Report(seed=seed, strategy=plan.strategy, requests=requests)
