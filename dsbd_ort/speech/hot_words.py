"""Hot words: names and phrases that a transcription favours, by a trie of their tokens.

Each token of a hot word adds a constant, the gain, to the log-probability of a text. Beams need the
bonus before a word is complete. So each token that begins or continues a word adds it at once, and
the bonus of an incomplete match is removed. With the word [1, 2, 3] and a gain of 2, the bonus so
far is 2, 4 and 0 after the tokens of the text [1, 2, 5], and 2, 4, 6 and 6 for [1, 2, 3, 5].
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dsbd_ort.constraints.position import object_states
from dsbd_ort.decoding.logits_processing.candidates import Scores
from dsbd_ort.decoding.logits_processing.constraint import States
from dsbd_ort.decoding.logits_processing.path_states import Tokens
from dsbd_ort.decoding.option_values import shown
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.tokenizer import Tokenizer

MOST_WORDS = 1024
_MOST_TOKENS = 32  # of one word

Word = tuple[int, ...]
_State = tuple[Word, int]
"""The word that a path has begun, and the number of its tokens that may still lose their bonus."""


class HotWords:
    """Scorer: adds a constant for each token of a word; an incomplete match loses it again."""

    name = "hot_words"

    def __init__(self, words: Sequence[Word], gain: float, vocab_size: int) -> None:
        """``words``: tokens of each word; ``gain``: log-probability added for each token."""
        self._words = frozenset(words)
        self._gain, self._vocab_size = gain, vocab_size
        self._next: dict[Word, set[int]] = {}
        for word in words:
            for end, token in enumerate(word):
                self._next.setdefault(word[:end], set()).add(token)

    def start(self, prompt_ids: Sequence[int]) -> States:
        """See Scorer."""
        state: _State = (), 0
        for token in prompt_ids:
            state = self._after(state, token)
        return object_states([state])

    def advance(self, states: States, tokens: Tokens) -> States:
        """See Scorer."""
        pairs = zip(states, tokens.tolist(), strict=True)
        return object_states([self._after(state, token) for state, token in pairs])

    def scores(self, states: States, tokens: Tokens | None) -> Scores:
        """See Scorer: the bonus that each next token gains or loses."""
        scores = np.zeros((len(states), self._vocab_size if tokens is None else tokens.shape[1]))
        for row, (begun, pending) in enumerate(states):
            scores[row] -= self._gain * pending
            gained: dict[int, int] = {}
            for matched, number in self._matches(begun, pending):
                for token in self._next.get(matched, ()):
                    gained.setdefault(token, number)
            if tokens is None:
                scores[row, [*gained]] += self._gain * np.array([*gained.values()])
            else:
                numbers = [gained.get(token, 0) for token in tokens[row].tolist()]
                scores[row] += self._gain * np.array(numbers)
        return scores

    def _after(self, state: _State, token: int) -> _State:
        for matched, number in self._matches(*state):
            if token in self._next.get(matched, ()):
                word = (*matched, token)
                if word in self._words:
                    return word if word in self._next else (), 0
                return word, number
        return (), 0

    def _matches(self, begun: Word, pending: int) -> Iterator[tuple[Word, int]]:
        """Yield beginnings of words at the end of a path, the longest first.

        With each: the number of tokens that may lose their bonus after a token that continues it.
        Only the first beginning may start within a complete word.
        """
        yield begun, pending + 1
        for size in range(min(len(begun) - 1, pending), -1, -1):
            yield begun[len(begun) - size :], size + 1


def read_hot_words(words: object, tokenizer: Tokenizer) -> tuple[Word, ...]:
    """Return the tokens of each hot word after a space; raise InputError if a word is invalid."""
    if words is None:
        return ()
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise InputError(f"hot_words is a {type(words).__name__}; expected a list of texts")
    if len(words) > MOST_WORDS:
        raise InputError(f"hot_words has {len(words)} texts; expected {MOST_WORDS} at most")
    token_ids_of_words = []
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
        token_ids_of_words.append(token_ids)
    return tuple(token_ids_of_words)
