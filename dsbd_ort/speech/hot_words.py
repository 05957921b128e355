"""Hot words: names and phrases that a transcription favours, by a trie of their tokens.

Each token of a hot word adds a constant to the log-probability of a text. Beams need the bonus
before a word is complete: so each token that begins or continues a word adds it at once, and the
bonus of an incomplete match is removed. With the word [1, 2, 3] and a gain of 2, the text [1, 2, 5]
has gained 2, 4 and 0 after each token; [1, 2, 3, 5] has gained 2, 4, 6 and 6.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.option_values import shown
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.tokenizer import Tokenizer

MOST_WORDS = 1024
_MOST_TOKENS = 32  # of one
_CACHED = 1024  # paths

Word = tuple[int, ...]


class HotWords:
    """A logits processor of the user's kind, (path, scores) -> scores; see ``DecodingConfig``."""

    def __init__(self, words: Sequence[Word], gain: float) -> None:
        """``words``: tokens of each word; ``gain``: log-probability added for each token."""
        self._words = frozenset(words)
        self._gain = gain
        self._next: dict[Word, set[int]] = {}
        for word in words:
            for end, token in enumerate(word):
                self._next.setdefault(word[:end], set()).add(token)
        self._states: dict[Word, tuple[Word, int]] = {}

    def __call__(self, path: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the scores of the next token, (vocab_size,), with its bonus or the loss of one."""
        begun, pending = self._state(tuple(path.tolist()))
        gains: dict[int, int] = {}
        for start in range(len(begun) + 1):
            if start and len(begun) - start > pending:
                continue  # it would begin within a complete word
            for token in self._next.get(begun[start:], ()):
                new = 1 if start == 0 else len(begun) - start + 1 - pending
                gains.setdefault(token, new)
        scores -= self._gain * pending
        for token, new in gains.items():
            scores[token] += self._gain * (pending + new)
        return scores

    def gained(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """Return the bonus of an output for all its hot words."""
        path, count = (*prompt_ids, *token_ids), 0
        begun, pending = self._state(tuple(prompt_ids))
        for end in range(len(prompt_ids), len(path)):
            before = pending
            begun, pending, num_complete = self._after(begun, before, path[end])
            count += pending - before + num_complete
        return self._gain * count

    def _state(self, path: Word) -> tuple[Word, int]:
        """Return the begun word of a path, and the number of tokens that may lose their bonus."""
        if (found := self._states.get(path)) is not None:
            return found
        state: tuple[Word, int] = ((), 0)
        left = path
        if (parent := self._states.get(path[:-1])) is not None:
            state, left = parent, path[-1:]
        for token in left:
            begun, pending, _ = self._after(*state, token)
            state = begun, pending
        if len(self._states) >= _CACHED:
            self._states.clear()
        self._states[path] = state
        return state

    def _after(self, begun: Word, pending: int, token: int) -> tuple[Word, int, int]:
        """Return both after one more token, and how many tokens the longest word completes."""
        for start in range(len(begun) + 1):
            if start and len(begun) - start > pending:
                continue
            if token in self._next.get(begun[start:], ()):
                word = (*begun[start:], token)
                num_pending = pending + 1 if start == 0 else len(word)
                if word in self._words:
                    return word if word in self._next else (), 0, num_pending
                return word, num_pending, 0
        return (), 0, 0


def read_hot_words(words: object, tokenizer: Tokenizer) -> tuple[Word, ...]:
    """Return the tokens of each hot word after a space; raise InputError for an invalid one."""
    if words is None:
        return ()
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise InputError(f"hot_words is a {type(words).__name__}; expected a list of texts")
    if len(words) > MOST_WORDS:
        raise InputError(f"hot_words has {len(words)} texts; expected {MOST_WORDS} at most")
    found = []
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InputError(f"hot_words has {shown(word)}; expected words or phrases, none empty")
        token_ids = tuple(tokenizer.encode(f" {word.strip()}", add_special_tokens=False))
        if len(token_ids) > _MOST_TOKENS:
            raise InputError(
                f"hot_words has a text of {len(token_ids)} tokens, {word[:40]!r}; expected "
                f"{_MOST_TOKENS} at most: words or short phrases"
            )
        if any(not tokenizer.decode([token]) for token in token_ids):
            raise InputError(
                f"hot_words has {shown(word)}, with a special token; expected text alone"
            )
        found.append(token_ids)
    return tuple(found)
