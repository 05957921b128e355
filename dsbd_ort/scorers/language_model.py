r"""A language model of words as a scorer of tokens, which are parts of words.

A word's score is added with the token that ends it: a token that begins with white space, a special
token, or the end of the text. So half a word does not change the rank of a beam. The score is

    weight * ln P(word | words before) + word_bonus

(shallow fusion; Gulcehre et al. 2015, section 4.1). The end of the text adds weight * ln P(</s>).
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.position import object_states
from dsbd_ort.decoding.logits_processing.candidates import Scores
from dsbd_ort.decoding.logits_processing.constraint import States
from dsbd_ort.decoding.logits_processing.path_states import Tokens
from dsbd_ort.decoding.option_values import Number
from dsbd_ort.scorers.ngram_files import END, NGrams, read_ngrams
from dsbd_runtime.text.tokenizer import Tokenizer

_LN10 = math.log(10.0)
_CONTINUES, _ENDS_WORD, _ENDS_TEXT = range(3)  # kinds of tokens
_SPACES = re.compile(rb"\s+")
_EDGES = re.compile(r"^[\W_]+|[\W_]+$")  # punctuation around a word
_MOST_READ = 64  # tokens read from the end of a prompt
_MOST_SPELLINGS = 2**16  # words whose spellings are cached
_MOST_BYTES = 256  # longest word: a text without white space would grow without end
_TokenTexts = tuple[list[bytes], NDArray[np.int8]]
"""The bytes of every token, and its kind, (vocab_size,)."""


class LanguageModel:
    """Scores of an n-gram model of words, for the option ``scorers``.

    White space separates words. A word is looked up as written, then without the punctuation around
    it; both in lower case if the model has no capital letters.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        weight: float = 0.2,
        word_bonus: float = 1.5,
        unknown_offset: float = -2.0,
    ) -> None:
        """Read an ARPA file, or KenLM's binary form with the package kenlm.

        weight, word_bonus: alpha and beta of pyctcdecode.
        unknown_offset: added to log10 of the probability of a word that the model lacks.

        The defaults suit a speech model with a small language model of a domain. The defaults of
        CTC decoders (weight 0.5, unknown_offset -10) made Whisper repeat itself.

        InputError: the file is not a language model. ConfigError: a number is invalid.
        """
        self._path = Path(path)
        self._given = {"weight": weight, "word_bonus": word_bonus, "unknown_offset": unknown_offset}
        self._numbers = (
            Number(0.0, 100.0).read("weight", weight) * _LN10,
            Number(-100.0, 100.0).read("word_bonus", word_bonus),
            Number(-1e3, 0.0).read("unknown_offset", unknown_offset),
        )
        self._ngrams = read_ngrams(self._path)
        self._texts: weakref.WeakKeyDictionary[Tokenizer, _TokenTexts] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={number:g}" for name, number in self._given.items())
        return f"LanguageModel({str(self._path)!r}, {numbers})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the numbers; another process reads the file again."""
        return functools.partial(LanguageModel, self._path, **self._given), ()

    def bind(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> WordScorer:
        """Return the scorer for a bundle; the texts of a tokenizer's tokens are read only once."""
        if (texts := self._texts.get(tokenizer)) is None:
            texts = self._texts[tokenizer] = _token_texts(tokenizer, vocab_size)
        contents, kinds = texts[0], texts[1].copy()
        kinds[[token for token in eos_token_ids if token < vocab_size]] = _ENDS_TEXT
        name = f"the language model {self._path.name}"
        return WordScorer(name, self._ngrams, self._numbers, contents, kinds)


def _token_texts(tokenizer: Tokenizer, vocab_size: int) -> _TokenTexts:
    """Return the bytes of every token, and whether it ends a word."""
    special = tokenizer.special_token_ids
    contents = [
        b" " if token in special else tokenizer.bytes_of(token) for token in range(vocab_size)
    ]
    kinds = [_ENDS_WORD if _ends_word(content) else _CONTINUES for content in contents]
    return contents, np.array(kinds, np.int8)


def _ends_word(content: bytes) -> bool:
    """Return whether white space comes before any letter of a token."""
    before, *others = _SPACES.split(content, maxsplit=1)
    return bool(others) and not _EDGES.sub("", before.decode(errors="replace"))


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """State of a path.

    history: the model's history of its complete words.
    text: bytes of its last, incomplete word.
    of_kind: the score that a next token of each kind adds.
    """

    history: Any
    text: bytes
    after: Any  # the history if the word ends here
    of_kind: tuple[float, float, float]


class WordScorer:
    """Scorer: a language model of words, for the tokens of one bundle."""

    def __init__(
        self,
        name: str,
        ngrams: NGrams,
        numbers: tuple[float, float, float],
        contents: Sequence[bytes],
        kinds: NDArray[np.int8],
    ) -> None:
        """``kinds``: kind of each token, (vocab_size,); ``contents``: bytes of each token."""
        self.name = name
        self._ngrams, self._contents, self._kinds = ngrams, contents, kinds
        self._weight, self._bonus, self._unknown = numbers
        self._has_capitals = any(word in ngrams for word in ("I", "The", "A", "In", "Ich", "Le"))
        self._spellings: dict[bytes, str] = {}

    def start(self, prompt_ids: Sequence[int]) -> States:
        """See Scorer; the prompt's words are the history of the first new word."""
        read = list(prompt_ids)[-_MOST_READ:]
        begins = len(read) == len(prompt_ids)
        state = self._state(self._ngrams.history(begins=begins), b"", 0.0)
        for token in read:
            state = self._advanced(state, token)
        return object_states([state])

    def advance(self, states: States, tokens: Tokens) -> States:
        """See Scorer."""
        pairs = zip(states, tokens.tolist(), strict=True)
        return object_states([self._advanced(state, token) for state, token in pairs])

    def scores(self, states: States, tokens: Tokens | None) -> Scores:
        """See Scorer."""
        kinds = self._kinds[None] if tokens is None else self._kinds[tokens]
        return self._of_kind(states)[np.arange(len(states))[:, None], kinds]

    def highest(self, states: States) -> NDArray[np.float64]:
        """See Scorer."""
        highest: NDArray[np.float64] = self._of_kind(states).max(axis=1)
        return highest

    def _of_kind(self, states: States) -> NDArray[np.float64]:
        return np.array([state.of_kind for state in states]).reshape(len(states), 3)

    def _advanced(self, state: _State, token: int) -> _State:
        *words, rest = _SPACES.split(state.text + self._contents[token])
        history, owed = state.history, 0.0
        if words and self._kinds[token] == _ENDS_WORD:  # its score is in ``of_kind``
            history, words = state.after, words[1:]
        for word in words:  # complete words within the token: the next token adds their scores
            score, history = self._word(history, word)
            owed += score
        return self._state(history, rest[-_MOST_BYTES:], owed)  # longer texts are not words

    def _state(self, history: Any, text: bytes, owed: float) -> _State:
        """Return a state; ``owed``: a score that any next token adds."""
        ended, after = self._word(history, text)
        end = self._weight * self._ngrams.score(after, END)[0]
        return _State(history, text, after, (owed, owed + ended, owed + ended + end))

    def _word(self, history: Any, text: bytes) -> tuple[float, Any]:
        """Return a word's score, 0 if it has no letters or digits, and the history after it."""
        word = self._spelled(text)
        if not word:
            return 0.0, history
        log10, after = self._ngrams.score(history, word)
        unknown = 0.0 if word in self._ngrams else self._unknown
        return self._weight * (log10 + unknown) + self._bonus, after

    def _spelled(self, text: bytes) -> str:
        """Return a word in the model's spelling, "" if it has no letters or digits."""
        if (spelling := self._spellings.get(text)) is not None:
            return spelling
        if len(self._spellings) >= _MOST_SPELLINGS:
            self._spellings.clear()
        word = text.decode(errors="replace")
        inner = _EDGES.sub("", word)
        if inner:
            forms = [word, inner]
            if not self._has_capitals:
                forms = [word.lower(), inner.lower()]
            inner = next((form for form in forms if form in self._ngrams), forms[-1])
        self._spellings[text] = inner
        return inner
