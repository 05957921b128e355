"""Results of a request: sequences with their text, stream pieces, stop strings, and JSON.

The text of a sequence is what its new tokens add to the text of the prompt (see
``stream_decoder``), without special tokens. A sequence ends with the token that completes a stop
string for the first time; its text is cut before the earliest stop string.

A stop string that names special tokens is looked for in the marked text as well (see
``special_marks``), so it ends a sequence by the ids of those tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.decoding import DecodedSequence, DecodingConfig, DecodingStats, IterationOutput
from dsbd_ort.decoding.logits_processing.path_states import StopState
from dsbd_ort.decoding.top_tokens import PromptLogprobs, TokenLogprobs
from dsbd_runtime.text.special_marks import MarkedWindow, marked, without_marks
from dsbd_runtime.text.stream_decoder import TextWindow

JSON_VERSION = 1
"""Raised when a field is removed or changes its meaning, not when a field is added."""


@dataclass(frozen=True, kw_only=True)
class GeneratedSequence(DecodedSequence):
    """A decoded sequence with its text, special tokens left out, cut before a stop string.

    Attributes:
        items: the items that the sequence means, if the request's trie has items; see TokenTrie.
    """

    text: str
    items: list[Any] | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The sequences, best first, the statistics of a request, and the seed that repeats it."""

    sequences: list[GeneratedSequence]
    stats: DecodingStats
    seed: int
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class StreamPiece:
    """New tokens that all live beams agree on, and text that is final: it is never taken back.

    All fields may be empty. Text is also held back while a character or a stop string is
    incomplete.

    Attributes:
        token_ids: the tokens.
        text: the text that became final with these tokens.
        token_logprobs: raw log-probability of every token under the target.
        stats_so_far: returns the statistics of the request up to this piece; call it before the
            next piece is read. None for the last piece: see the result instead.
        top_logprobs: for each token, the most probable tokens at its position; None unless the
            request sets ``top_logprobs``.
    """

    token_ids: list[int]
    text: str
    token_logprobs: list[float]
    stats_so_far: Callable[[], DecodingStats] | None = field(
        default=None, repr=False, compare=False
    )
    top_logprobs: list[TokenLogprobs] | None = None


class TextStream:
    """Turns the iterations of a request into stream pieces: the tokens and text each one adds."""

    def __init__(self, start: TextWindow, stop_texts: Sequence[str], num_exempt: int = 0) -> None:
        """``start``: the window after the prompt; ``num_exempt``: first tokens without stops."""
        special = special_stops(start, stop_texts)
        self._window: TextWindow | MarkedWindow = MarkedWindow(start) if special else start
        self._special = start.tokenizer.special_token_ids if special else frozenset[int]()
        # the first reads marked text
        self._stops = [StopFilter(special)] * bool(special) + [StopFilter(stop_texts)]
        self._num_exempt = num_exempt
        self._num_shown = 0

    def push(self, output: IterationOutput) -> StreamPiece:
        """Return the tokens that all beams of ``output`` agree on, beyond those returned before."""
        shown = self._num_shown
        tokens = output.agreed_tokens[shown:]
        if not tokens:
            return StreamPiece([], "", [], output.stats)
        text = self.text_of(tokens)
        tops = output.agreed_top_logprobs(shown)
        return StreamPiece(tokens, text, output.agreed_logprobs(shown), output.stats, tops)

    def finish(self, best: GeneratedSequence) -> StreamPiece:
        num_shown = self._num_shown
        tokens = best.token_ids[num_shown:]
        text = self.text_of(tokens) + self.rest()
        tops = best.top_logprobs and best.top_logprobs[num_shown:]
        return StreamPiece(tokens, text, best.token_logprobs[num_shown:], None, tops)

    def text_of(self, tokens: list[int]) -> str:
        """Take the next tokens; return the text, before any stop string, that became final."""
        num_exempt = max(self._num_exempt - self._num_shown, 0)
        self._num_shown += len(tokens)
        exempt = [token for token in tokens[:num_exempt] if token not in self._special]
        self._window, first = self._window.extended(exempt)
        self._window, text = self._window.extended(tokens[num_exempt:])
        for stops in self._stops:
            text = without_marks(stops.push(text))
        return first + text

    def rest(self) -> str:
        """Return the text that was not final, at the end of the tokens."""
        text = self._window.rest()
        for stops in self._stops:
            text = without_marks(stops.push(text) + stops.finish())
        return text


@dataclass(frozen=True)
class StopSearch:
    """A decoding.StopState that searches the text of one path for stop strings.

    window: the end of the path's tokens, at first the end of the prompt; if it is marked, so are
        the stop strings.
    tail: the end of the path's final text, in which a stop string may have begun.
    """

    window: TextWindow | MarkedWindow
    stop_texts: tuple[str, ...]
    has_ended: bool = False
    tail: str = ""

    def extended(self, token: int) -> StopSearch:
        if self.has_ended:
            return self
        window, piece = self.window.extended((token,))
        text = self.tail + piece
        max_tail = max(map(len, self.stop_texts)) - 1
        tail = text[max(len(text) - max_tail, 0) :]
        uncertain = window.end_of_rest(max_tail + 1)
        at_the_end = uncertain if len(uncertain) > max_tail else tail + uncertain
        has_ended = any(stop in text or stop in at_the_end for stop in self.stop_texts)
        return StopSearch(window, self.stop_texts, has_ended, tail)


@dataclass(frozen=True)
class StopSearches:
    """A decoding.StopState that ends as soon as one of several searches ends."""

    searches: tuple[StopSearch, ...]

    @property
    def has_ended(self) -> bool:
        return any(search.has_ended for search in self.searches)

    def extended(self, token: int) -> StopSearches:
        return StopSearches(tuple(search.extended(token) for search in self.searches))


def special_stops(start: TextWindow, stop_texts: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings that name special tokens, marked."""
    pairs = ((text, marked(text, start.tokenizer)) for text in stop_texts)
    return tuple(each for text, each in pairs if each != text)


def stop_state(start: TextWindow, stop_texts: tuple[str, ...]) -> StopState | None:
    """Return the state of the empty continuation, which finds stop strings; None without any."""
    if not stop_texts:
        return None
    search = StopSearch(start, stop_texts)
    if special := special_stops(start, stop_texts):
        return StopSearches((search, StopSearch(MarkedWindow(start), special)))
    return search


def text_before_stop(text: str, stop_texts: Sequence[str], num_exempt: int = 0) -> str:
    """Return ``text`` up to its earliest stop string after the first ``num_exempt`` characters."""
    begins = [begin for stop in stop_texts if (begin := text.find(stop, num_exempt)) >= 0]
    return text[: min(begins, default=None)]


def text_until_stop(start: TextWindow, token_ids: list[int], config: DecodingConfig) -> str:
    """Return the text of new tokens, up to a stop string after the first ``min_new_tokens``."""
    if special_stops(start, config.stop_strings):
        stream = TextStream(start, config.stop_strings, config.min_new_tokens)
        return stream.text_of(token_ids) + stream.rest()
    text = start.text_of(token_ids)
    if not config.stop_strings or not config.min_new_tokens:
        return text_before_stop(text, config.stop_strings)
    exempt = start.text_of(token_ids[: config.min_new_tokens])
    while not text.startswith(exempt):  # its last character is cut, or became another
        exempt = exempt[:-1]
    return text_before_stop(text, config.stop_strings, len(exempt))


class StopFilter:
    """Streams text up to the first stop string; text that may begin one is held back."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = stop_texts
        self._held = ""
        self._is_over = False

    def push(self, piece: str) -> str:
        """Take the next piece; return the text that can no longer be part of a stop string."""
        if self._is_over:
            return ""
        text = self._held + piece
        shown = text_before_stop(text, self._stop_texts)
        self._is_over = len(shown) < len(text)
        num_held = 0 if self._is_over else self._num_begun(text)
        self._held = text[len(text) - num_held :]
        return shown[: len(shown) - num_held]

    def finish(self) -> str:
        """Return the text held back: the beginning of a stop string that was never completed."""
        rest = "" if self._is_over else self._held
        self._held, self._is_over = "", False
        return rest

    def _num_begun(self, text: str) -> int:
        return max(
            (
                length
                for stop in self._stop_texts
                for length in range(1, min(len(stop) - 1, len(text)) + 1)
                if text.endswith(stop[:length])
            ),
            default=0,
        )


def result_object(result: GenerationResult) -> dict[str, Any]:
    """Return the fields of an answered request, texts first, without fields not requested."""
    fields = {**dataclasses.asdict(result), "version": JSON_VERSION}
    fields["sequences"] = [{"text": each["text"], **each} for each in fields["sequences"]]
    for holder, name in [
        (fields, "prompt_logprobs"),
        *((s, name) for s in fields["sequences"] for name in ("top_logprobs", "items")),
    ]:
        if holder[name] is None:
            del holder[name]
    return fields


def error_object(message: str) -> dict[str, Any]:
    """Return the fields of a request that was not answered."""
    return {"version": JSON_VERSION, "error": message}


def json_text(fields: Any, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Return ``fields`` as JSON, on one line without ``indent``; NaN and infinity become null.

    Characters are not escaped unless ``ensure_ascii`` is set or the text holds a lone surrogate.
    """
    dumps = functools.partial(json.dumps, allow_nan=False, indent=indent)
    try:
        text = dumps(fields, ensure_ascii=ensure_ascii)
    except ValueError:
        fields = _finite(fields)
        text = dumps(fields, ensure_ascii=ensure_ascii)
    try:
        text.encode()
    except UnicodeEncodeError:
        return dumps(fields, ensure_ascii=True)
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {_finite(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
