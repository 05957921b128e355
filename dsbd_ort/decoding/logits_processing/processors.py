"""Logits processors: penalties, bans and biases, as functions of the path (docs/algorithm.md 3.8).

Each changes the scores of the next token of many paths at once; their meaning and order are those
of transformers' processors of the same names, presence and frequency penalty OpenAI's. The scores
are raw logits, or for rule "search" raw log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.candidates import Candidates, LogitsProcessor, Scores
from dsbd_ort.decoding.logits_processing.path_states import Tokens
from dsbd_ort.decoding.logits_processing.timestamps import Timestamps
from dsbd_ort.decoding.option_values import shown


class _Bias(LogitsProcessor):
    """Adds a constant to the scores of some tokens: logit_bias, suppress_tokens, single bad words.

    A bias of -inf forbids a token.
    """

    def __init__(self, bias_by_token: Sequence[tuple[int, float]], vocab_size: int) -> None:
        self._biases = np.zeros(vocab_size)
        for token, bias in bias_by_token:
            self._biases[token] += bias
        self.raises = any(bias > 0.0 for _, bias in bias_by_token)

    @classmethod
    def ban(cls, tokens: Iterable[int], vocab_size: int) -> _Bias:
        return cls([(token, -np.inf) for token in tokens], vocab_size)

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        scores += candidates.of(self._biases)
        return scores


class _RepetitionPenalty(LogitsProcessor):
    """Divides positive scores of tokens that prompt or path hold by it, multiplies negative ones.

    Keskar et al. 2019 (CTRL), section 4.1.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty, self.raises = penalty, penalty < 1.0

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        penalised = np.where(scores < 0.0, scores * self._penalty, scores / self._penalty)
        return np.where(candidates.is_seen, penalised, scores)


class _CountPenalty(LogitsProcessor):
    """Subtracts ``presence`` from tokens among the new ones, ``frequency`` for each time."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self.raises = presence < 0.0 or frequency < 0.0

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        counts = candidates.new_counts
        scores -= self._presence * (counts > 0) + self._frequency * counts
        return scores


class _NoRepeatNgram(LogitsProcessor):
    """Forbids the token that would make an n-gram which prompt and path hold already.

    The tokens after each (n-1)-gram of the shared ones are kept in a table; the own tokens of a
    path are few, and searched.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._next_tokens: dict[tuple[int, ...], list[int]] = {}
        self._num_known = 0  # shared tokens whose n-grams are in the table

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        paths = candidates.paths
        self._learn(paths.shared)
        num_tokens = paths.num_new(candidates.nodes) + paths.num_prompt
        num_own = int(num_tokens.max()) - len(paths.shared)
        recent = paths.tail(candidates.nodes, num_own + self._size - 1)
        begun = recent[:, recent.shape[1] - self._size + 1 :]
        rows, banned = self._repeated(recent, begun)
        for row, ngram in enumerate(map(tuple, begun.tolist())):
            if next_tokens := self._next_tokens.get(ngram):
                rows += [row] * len(next_tokens)
                banned += next_tokens
        scores[candidates.places(np.array(rows, np.int64), np.array(banned, np.int64))] = -np.inf
        return scores

    def _learn(self, shared: Tokens) -> None:
        size = self._size
        for end in range(max(self._num_known, size - 1), len(shared)):
            *begun, token = shared[end - size + 1 : end + 1].tolist()
            self._next_tokens.setdefault(tuple(begun), []).append(token)
        self._num_known = len(shared)

    def _repeated(self, recent: Tokens, begun: Tokens) -> tuple[list[int], list[int]]:
        """Return (row, token) pairs of what followed ``begun`` among the recent tokens."""
        if recent.shape[1] < self._size:
            return [], []
        windows = np.lib.stride_tricks.sliding_window_view(recent, self._size, axis=1)
        is_same = (windows[:, :, :-1] == begun[:, None]).all(axis=2) & (windows[:, :, 0] >= 0)
        rows, places = is_same.nonzero()
        return rows.tolist(), windows[rows, places, -1].tolist()


class _NoSourceNgram(LogitsProcessor):
    """Forbids the token that would make an n-gram of the source, or of the prompt without one."""

    def __init__(self, size: int, source: Sequence[int], vocab_size: int) -> None:
        """Take n, at least 1, and the tokens whose n-grams are forbidden."""
        self._size = size
        self._next_tokens: dict[tuple[int, ...], list[int]] = {}
        for end in range(size - 1, len(source)):
            *begun, token = source[end - size + 1 : end + 1]
            if token < vocab_size:  # a source may have tokens that no target has
                self._next_tokens.setdefault(tuple(begun), []).append(token)

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        begun = candidates.paths.tail(candidates.nodes, self._size - 1)
        found = [self._next_tokens.get(ngram, []) for ngram in map(tuple, begun.tolist())]
        rows = np.repeat(np.arange(len(found)), [len(tokens) for tokens in found])
        banned = np.array([token for tokens in found for token in tokens], np.int64)
        scores[candidates.places(rows, banned)] = -np.inf
        return scores


class _BadWords(LogitsProcessor):
    """Forbids the last token of a sequence of several if the path ends with those before it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Take sequences of at least two tokens."""
        self._sequences = [np.array(sequence, dtype=np.int64) for sequence in sequences]

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        for sequence in self._sequences:
            tail = candidates.paths.tail(candidates.nodes, len(sequence) - 1)
            rows = (tail == sequence[:-1]).all(axis=1).nonzero()[0]
            scores[candidates.places(rows, np.full(len(rows), sequence[-1]))] = -np.inf
        return scores


class _BanByLength(LogitsProcessor):
    """Forbids tokens by the number of new tokens of a path."""

    def __init__(self, tokens: Sequence[int] | Tokens, is_banned: Callable[[Tokens], Any]) -> None:
        """Take tokens; ``is_banned`` returns where they are forbidden, by numbers of new tokens."""
        self._tokens = np.array(tokens, dtype=np.int64)
        self._is_banned = is_banned

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        paths = self._is_banned(candidates.paths.num_new(candidates.nodes)).nonzero()[0]
        rows = np.repeat(paths, len(self._tokens))
        scores[candidates.places(rows, np.tile(self._tokens, len(paths)))] = -np.inf
        return scores


class _ForcedToken(LogitsProcessor):
    """Allows one token alone, with score 0, if a path has a certain length."""

    def __init__(self, token: int | None, num_tokens: int) -> None:
        """Take the token and the path's length, the prompt included."""
        self._token, self._num_tokens = token, num_tokens

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        forced = self.may_raise(candidates).nonzero()[0]
        scores[forced] = -np.inf
        scores[candidates.places(forced, np.full(len(forced), self._token))] = 0.0
        return scores

    def may_raise(self, candidates: Candidates) -> NDArray[np.bool_]:
        paths = candidates.paths
        lengths = paths.num_new(candidates.nodes) + paths.num_prompt
        return np.asarray(lengths == self._num_tokens)


UserProcessor = Callable[[NDArray[np.int64], NDArray[np.float64]], NDArray[np.float64]]
"""(path, scores) -> scores: the prompt and the new tokens, (num_tokens,) int64; (vocab_size,).

Tokens that cannot be drawn, or that a draft's top-k head left out, have the score -inf."""


class _PathFunction(LogitsProcessor):
    """A user's own function of one path and its scores, called for each; it sees all tokens."""

    raises = True

    def __init__(self, function: UserProcessor) -> None:
        """Take a deterministic function; it may change the scores in place and must return them."""
        self._function = function

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        for row, node in enumerate(candidates.nodes.tolist()):
            path = candidates.paths.path(node)
            if candidates.tokens is None:
                scores[row] = self._of_path(path, scores[row])
                continue
            is_token = candidates.tokens[row] >= 0
            tokens = candidates.tokens[row, is_token]
            by_token = np.full(candidates.vocab_size, -np.inf)
            by_token[tokens] = scores[row, is_token]
            scores[row, is_token] = self._of_path(path, by_token)[tokens]
        return scores

    def _of_path(self, path: Tokens, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.asarray(self._function(path, scores), dtype=np.float64)
        if found.shape != scores.shape or np.isnan(found).any() or np.isposinf(found).any():
            raise ConstraintError(
                f"the processor {shown(self._function)} returned scores of shape {found.shape}"
                f"{', with NaN or +inf,' * (found.shape == scores.shape)} after {len(path)} "
                f"tokens; expected shape {scores.shape}, finite or -inf"
            )
        return found


def processors_of(
    config: DecodingConfig, num_prompt: int, vocab_size: int, source: Sequence[int] = ()
) -> list[LogitsProcessor]:
    """Return the processors of a request, in transformers' order.

    source: the tokens of its source or, without one, of its prompt.
    """
    source_size = config.encoder_no_repeat_ngram_size
    eos = np.array(sorted(config.eos_ids), dtype=np.int64)
    bad_words = config.bad_words_ids
    longer = [word for word in bad_words if len(word) > 1]
    last = num_prompt + config.max_new_tokens - 1
    is_first_forced = config.forced_bos_token_id is not None and num_prompt == 1
    by_need: list[tuple[object, Callable[[], LogitsProcessor]]] = [
        (config.logit_bias, lambda: _Bias(config.logit_bias, vocab_size)),
        (config.repetition_penalty != 1.0, lambda: _RepetitionPenalty(config.repetition_penalty)),
        (
            config.presence_penalty or config.frequency_penalty,
            lambda: _CountPenalty(config.presence_penalty, config.frequency_penalty),
        ),
        (config.no_repeat_ngram_size, lambda: _NoRepeatNgram(config.no_repeat_ngram_size)),
        (source_size, lambda: _NoSourceNgram(source_size, source, vocab_size)),
        (
            len(bad_words) > len(longer),
            lambda: _Bias.ban([word[0] for word in bad_words if len(word) == 1], vocab_size),
        ),
        (longer, lambda: _BadWords(longer)),
        (
            config.min_new_tokens and len(eos),
            lambda: _BanByLength(eos, lambda num_new: num_new < config.min_new_tokens),
        ),
        (
            config.forced_bos_token_id is not None,
            lambda: _ForcedToken(config.forced_bos_token_id, 1),
        ),
        (
            config.forced_eos_token_id is not None,
            lambda: _ForcedToken(config.forced_eos_token_id, last),
        ),
        (config.suppress_tokens, lambda: _Bias.ban(config.suppress_tokens, vocab_size)),
        (
            config.begin_suppress_tokens,
            lambda: _BanByLength(
                config.begin_suppress_tokens, lambda num_new: num_new == is_first_forced
            ),
        ),
        (config.no_timestamps_token_id is not None, lambda: Timestamps(config)),
    ]
    found = [make() for is_needed, make in by_need if is_needed]
    return found + [_PathFunction(function) for function in config.logits_processors]
