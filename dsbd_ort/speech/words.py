"""Words of a text: their tokens, times and probabilities.

Tokens are grouped as in transformers: at spaces or, in languages without spaces between words, at
characters; punctuation belongs to the word next to it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.speech.token_times import token_positions
from dsbd_ort.speech.transcript import SpokenWord
from dsbd_runtime.parts.alignment import AlignedTokens
from dsbd_runtime.parts.speech_entry import SoundFeatures, SpeechEntry
from dsbd_runtime.text.tokenizer import Tokenizer

Align = Callable[[SoundFeatures, Sequence[int], Sequence[int]], AlignedTokens]
"""See ``Alignment.align``."""

_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_BEFORE_WORDS = "\"'“¡¿([{-"
_AFTER_WORDS = "\"'.。,\uff0c!\uff01?\uff1f:\uff1a”)]}、"  # some of full width
_NO_CHARACTER = "\ufffd"  # decoded from bytes of an incomplete character


@dataclass(frozen=True)
class TokenTimes:
    """Times and probabilities of the tokens of a window.

    start, end: (n,) float64. Seconds from the start of the audio, without gaps.
    probabilities: (n,) float64, among the tokens of texts and their end; 0 of a time.
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
    """Return the times of the new tokens of a window, ``num_frames`` of which have sound.

    token_ids: the new tokens, with that which ends them.
    seek: first frame of the window.
    start_token_id: that every text begins with; tokens of texts and their end are below it.
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
    """Return the probability of each token among the first; 0 of any other, (n,)."""
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

    first: index of its first token in the window.
    language: code of that which the text is in; None: it has spaces.
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
    """Tokens that are one word, by their indices, and its text."""

    text: str
    indices: list[int]

    def append(self, other: TokenGroup) -> None:
        """Append another group to this one."""
        self.text += other.text
        self.indices = [*self.indices, *other.indices]


def grouped(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], *, has_spaces: bool
) -> list[TokenGroup]:
    """Return the words of tokens of text alone; without ``has_spaces`` each character is one."""
    groups = _characters(token_ids, decode)
    return _with_punctuation(_at_spaces(groups) if has_spaces else groups)


def _characters(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[TokenGroup]:
    """Return the smallest groups of tokens that are whole characters."""
    whole = decode(token_ids)
    groups: list[TokenGroup] = []
    begin = num_read = 0
    for stop in range(1, len(token_ids) + 1):
        text = decode(token_ids[begin:stop])
        broken = text.find(_NO_CHARACTER)
        is_whole = broken < 0 or whole[num_read + broken : num_read + broken + 1] in (
            "",
            _NO_CHARACTER,  # the text has it, broken or not
        )
        if is_whole or stop == len(token_ids):
            groups.append(TokenGroup(text, list(range(begin, stop))))
            begin, num_read = stop, num_read + len(text)
    return groups


def _at_spaces(groups: Sequence[TokenGroup]) -> list[TokenGroup]:
    """Join groups that are not punctuation and do not begin with a space to the group before."""
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
