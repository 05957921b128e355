"""Words of a text: their tokens, times and probabilities, as in transformers' Whisper.

The attention weights of the alignment heads are normalized over the tokens, smoothed by a median
over the positions, and averaged. Dynamic time warping then finds the path through tokens and
positions, both in order, with the highest weights. The position at which the path reaches a token
is the time of the token.

Tokens are grouped into words at spaces or, in languages without spaces between words, at
characters. Punctuation belongs to the word next to it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.speech.transcript import SpokenWord
from dsbd_runtime.parts.source.alignment import AlignedTokens
from dsbd_runtime.parts.source.speech_entry import SoundFeatures, SpeechEntry
from dsbd_runtime.text.tokenizer import Tokenizer

Matrix = NDArray[np.float32]
_DIAGONAL, _TOKEN, _POSITION = 0, 1, 2  # steps of the path: to the next token, position, or both


def token_positions(weights: Matrix, median_filter_width: int) -> NDArray[np.int64]:
    """Return the position of the sound of each token, (n,) int64, increasing.

    weights: (A, n - 1, N) float32, of A heads. The last token gets the position of the one before.
    """
    if not weights.shape[1]:
        return np.zeros(1, np.int64)
    positions = warped(-smoothed(weights, median_filter_width))
    return np.append(positions, positions[-1])


def smoothed(weights: Matrix, median_filter_width: int) -> Matrix:
    """Return weights (A, S, N) normalized, smoothed and averaged over the heads, (S, N)."""
    deviation = weights.std(axis=1, keepdims=True)
    centred = weights - weights.mean(axis=1, keepdims=True)
    # A position with equal weights of all tokens carries no information.
    scaled = np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)
    medians = [_median(head, median_filter_width) for head in scaled]
    return np.asarray(np.mean(medians, axis=0, dtype=np.float32))


def _median(values: Matrix, width: int) -> Matrix:
    """Return the medians of ``width`` neighbours in each row, mirrored at its ends."""
    half = width // 2
    if values.shape[1] <= half:
        return values
    padded = np.pad(values, [(0, 0), (half, half)], mode="reflect")
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    return np.asarray(np.partition(neighbours, half, axis=2)[..., half])


def warped(costs: Matrix) -> NDArray[np.int64]:
    """Return the first position of each token on the cheapest path, (S,) int64.

    costs: (S, N) float32. Cost of each token at each position. The path leads from the first token
    and position to the last token and position, by steps to the next token, the next position, or
    both. As in transformers, sums are float32, and the step is to the next position unless another
    step is cheaper than both alternatives. Cells with the same sum of token and position do not
    depend on each other, so they are computed together.
    """
    num_tokens, num_positions = costs.shape
    tokens = np.arange(num_tokens)[:, None]
    by_sum = np.zeros((num_tokens + num_positions - 1, num_tokens), np.float32)
    by_sum[tokens + np.arange(num_positions), tokens] = costs
    steps = np.empty(by_sum.shape, np.int8)
    # Sums of the two previous diagonals, by token + 1. A path may start only at the first token and
    # position.
    before_last, last = (np.full(num_tokens + 1, np.inf, np.float32) for _ in range(2))
    before_last[0] = 0.0
    for place, costs_here in enumerate(by_sum):
        first, stop = max(0, place - num_positions + 1), min(num_tokens, place + 1)
        both, token = before_last[first:stop], last[first:stop]
        position = last[first + 1 : stop + 1]
        is_both = (both < token) & (both < position)
        is_token = (token < both) & (token < position)
        steps[place, first:stop] = np.where(
            is_both, _DIAGONAL, np.where(is_token, _TOKEN, _POSITION)
        )
        sums = np.full(num_tokens + 1, np.inf, np.float32)
        best = np.where(is_both, both, np.where(is_token, token, position))
        sums[first + 1 : stop + 1] = costs_here[first:stop] + best
        before_last, last = last, sums
    return _first_positions(steps, num_positions)


def _first_positions(steps: NDArray[np.int8], num_positions: int) -> NDArray[np.int64]:
    """Walk back from the last token and position; ``steps``: by sum of both, then token."""
    num_tokens = steps.shape[1]
    positions = np.zeros(num_tokens, np.int64)
    token, position = num_tokens - 1, num_positions - 1
    while token > 0:
        positions[token] = position
        step = steps[token + position, token] if position else _TOKEN
        token -= step != _POSITION
        position -= step != _TOKEN
    return positions  # the first token begins at the first position


Align = Callable[[SoundFeatures, Sequence[int], Sequence[int]], AlignedTokens]
"""See ``Alignment.align``."""

_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_BEFORE_WORDS = "\"'“¡¿([{-"
_AFTER_WORDS = "\"'.。,\uff0c!\uff01?\uff1f:\uff1a”)]}、"  # some are full-width characters
_NO_CHARACTER = "\ufffd"  # decoded from bytes of an incomplete character


@dataclass(frozen=True)
class TokenTimes:
    """Times and probabilities of the tokens of a window.

    start, end: (n,) float64. Seconds from the start of the audio, without gaps.
    probabilities: (n,) float64, normalized over text tokens and the end token; 0 for a timestamp.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    probabilities: NDArray[np.float64]


def token_times(
    aligned: AlignedTokens,
    token_ids: Sequence[int],
    seek: int,
    num_frames: int,
    speech: SpeechEntry,
    start_token_id: int,
) -> TokenTimes:
    """Return the times of the new tokens of a window.

    token_ids: the new tokens, including the end token.
    seek: first frame of the window.
    num_frames: frames of the window that have sound.
    start_token_id: the token that begins every text; text tokens and the end token are below it.
    """
    assert speech.alignment is not None  # the request was checked
    num_positions = max(num_frames * speech.num_positions // speech.num_frames, 1)
    weights = aligned.weights[..., :num_positions]
    positions = token_positions(weights, speech.alignment.median_filter_width)
    a_position = speech.seconds_per_frame * speech.num_frames / speech.num_positions
    begin = seek * speech.seconds_per_frame
    end = np.asarray(begin + positions * a_position, np.float64)
    start = np.append(begin, end[:-1])
    return TokenTimes(start, end, _probabilities(aligned.logits, token_ids, start_token_id))


def _probabilities(
    logits: NDArray[np.float32], token_ids: Sequence[int], num_texts: int
) -> NDArray[np.float64]:
    """Return each token's probability among the first ``num_texts`` tokens, (n,); 0 for others."""
    of_texts = logits[:, :num_texts]
    exponentials = np.exp(of_texts - of_texts.max(axis=1, keepdims=True))
    ids = np.array(token_ids)
    chosen = np.take_along_axis(exponentials, np.minimum(ids, num_texts - 1)[:, None], axis=1)
    return np.asarray(
        np.where(ids < num_texts, chosen[:, 0] / exponentials.sum(axis=1, dtype=np.float64), 0.0)
    )


def words_of_segment(
    token_ids: Sequence[int],
    times: TokenTimes,
    first: int,
    language: str | None,
    speech: SpeechEntry,
    tokenizer: Tokenizer,
) -> tuple[SpokenWord, ...]:
    """Return the words of a segment with their times.

    first: index of the segment's first token in the window.
    language: language code; None: a language with spaces.
    """
    texts = [
        index
        for index, token in enumerate(token_ids)
        if not speech.is_time(token) and tokenizer.adds_text(token)
    ]
    tokens = [token_ids[index] for index in texts]
    words = []
    for word in grouped(tokens, tokenizer.decode, has_spaces=language not in _WITHOUT_SPACES):
        places = [first + texts[index] for index in word.indices]
        words.append(
            SpokenWord(
                word=word.text,
                start=round(float(times.start[places[0]]), 2),
                end=round(float(times.end[places[-1]]), 2),
                probability=float(times.probabilities[places].mean()),
            )
        )
    return tuple(words)


@dataclass
class TokenGroup:
    """A word: its text and the indices of its tokens."""

    text: str
    indices: list[int]

    def append(self, other: TokenGroup) -> None:
        self.text += other.text
        self.indices = [*self.indices, *other.indices]


def grouped(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, has_spaces: bool
) -> list[TokenGroup]:
    """Return the words of text tokens; without ``has_spaces`` each character is a word."""
    groups = _characters(token_ids, decode)
    return _with_punctuation(_at_spaces(groups) if has_spaces else groups)


def _characters(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[TokenGroup]:
    whole = decode(token_ids)
    groups: list[TokenGroup] = []
    begin = num_read = 0
    for stop in range(1, len(token_ids) + 1):
        text = decode(token_ids[begin:stop])
        broken = text.find(_NO_CHARACTER)
        is_whole = broken < 0 or whole[num_read + broken : num_read + broken + 1] in (
            "",
            _NO_CHARACTER,  # the whole text has this character too
        )
        if is_whole or stop == len(token_ids):
            groups.append(TokenGroup(text, list(range(begin, stop))))
            begin, num_read = stop, num_read + len(text)
    return groups


def _at_spaces(groups: Sequence[TokenGroup]) -> list[TokenGroup]:
    """Join each group without a space in front, except punctuation, to the group before it."""
    words: list[TokenGroup] = []
    for group in groups:
        begins = group.text.startswith(" ") or group.text.strip() in string.punctuation
        if begins or not words:
            words.append(TokenGroup(group.text, group.indices))
        else:
            words[-1].append(group)
    return words


def _with_punctuation(words: Sequence[TokenGroup]) -> list[TokenGroup]:
    """Join opening punctuation to the word after it, other punctuation to the word before it."""
    joined: list[TokenGroup] = []  # the last first
    for word in reversed(words):
        opens = word.text.startswith(" ") and word.text.strip() in _BEFORE_WORDS
        if opens and joined:
            word.append(joined.pop())
        joined.append(word)
    closed: list[TokenGroup] = []
    for word in reversed(joined):
        if closed and not closed[-1].text.endswith(" ") and word.text in _AFTER_WORDS:
            closed[-1].append(word)
        else:
            closed.append(word)
    return [word for word in closed if word.text]
