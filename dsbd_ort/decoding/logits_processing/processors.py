"""Logits processors: penalties, bans and biases, as functions of the path (docs/algorithm.md 3.8).

Each changes the scores of the next token of many paths at once; their meaning and order are those
of transformers' processors of the same names, presence and frequency penalty OpenAI's. The scores
are raw logits, or for rule "search" raw log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.candidates import (
    Candidates,
    LogitsProcessor,
    Scores,
    given_scores,
)
from dsbd_ort.decoding.logits_processing.path_states import Tokens
from dsbd_ort.decoding.option_values import shown


class _Bias(LogitsProcessor):
    """Adds a constant to some tokens, -inf to forbid: logit_bias, suppress_tokens, single words."""

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

    A table holds the next tokens of each (n-1)-gram in the tokens that all paths share. The few
    tokens that a path has beyond them are searched.
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
        next_tokens = [self._next_tokens.get(ngram, []) for ngram in map(tuple, begun.tolist())]
        rows = np.repeat(np.arange(len(next_tokens)), [len(tokens) for tokens in next_tokens])
        banned = np.array([token for tokens in next_tokens for token in tokens], np.int64)
        scores[candidates.places(rows, banned)] = -np.inf
        return scores


class _BadWords(LogitsProcessor):
    """Forbids the last token of a sequence of several if the path ends with those before it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [np.array(sequence, dtype=np.int64) for sequence in sequences]

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        for sequence in self._sequences:
            tail = candidates.paths.tail(candidates.nodes, len(sequence) - 1)
            rows = (tail == sequence[:-1]).all(axis=1).nonzero()[0]
            scores[candidates.places(rows, np.full(len(rows), sequence[-1]))] = -np.inf
        return scores


class _BanByLength(LogitsProcessor):
    """Forbids tokens by the number of new tokens of a path."""

    def __init__(self, tokens: Sequence[int], is_banned: Callable[[Tokens], Any]) -> None:
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

    def __init__(self, token: int, num_tokens: int) -> None:
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
        given = np.asarray(self._function(path, scores), dtype=np.float64)
        checked = given_scores(given)
        if checked is None or checked.shape != scores.shape:
            raise ConstraintError(
                f"the processor {shown(self._function)} returned scores of shape {given.shape}"
                f"{', with NaN or more than 1e30,' * (checked is None)} after {len(path)} tokens; "
                f"expected shape {scores.shape}, finite or -inf"
            )
        return checked


def processors_of(
    config: DecodingConfig, num_prompt: int, vocab_size: int, source: Sequence[int] = ()
) -> Iterator[LogitsProcessor]:
    """Yield processors in transformers' order; ``source``: its tokens, or else the prompt's."""
    if config.logit_bias:
        yield _Bias(config.logit_bias, vocab_size)
    if config.repetition_penalty != 1.0:
        yield _RepetitionPenalty(config.repetition_penalty)
    if config.presence_penalty or config.frequency_penalty:
        yield _CountPenalty(config.presence_penalty, config.frequency_penalty)
    if config.no_repeat_ngram_size:
        yield _NoRepeatNgram(config.no_repeat_ngram_size)
    if size := config.encoder_no_repeat_ngram_size:
        yield _NoSourceNgram(size, source, vocab_size)
    if single := [word[0] for word in config.bad_words_ids if len(word) == 1]:
        yield _Bias.ban(single, vocab_size)
    if longer := [word for word in config.bad_words_ids if len(word) > 1]:
        yield _BadWords(longer)
    if config.min_new_tokens and config.eos_ids:
        yield _BanByLength(sorted(config.eos_ids), lambda num_new: num_new < config.min_new_tokens)
    if config.forced_bos_token_id is not None:
        yield _ForcedToken(config.forced_bos_token_id, 1)
    if config.forced_eos_token_id is not None:
        last = num_prompt + config.max_new_tokens - 1
        yield _ForcedToken(config.forced_eos_token_id, last)
    if config.suppress_tokens:
        yield _Bias.ban(config.suppress_tokens, vocab_size)
    if config.begin_suppress_tokens:
        is_forced = config.forced_bos_token_id is not None and num_prompt == 1
        yield _BanByLength(config.begin_suppress_tokens, lambda num_new: num_new == is_forced)
    if config.no_timestamps_token_id is not None:
        yield _Timestamps(config)
    yield from map(_PathFunction, config.logits_processors)


class _Timestamps(LogitsProcessor):
    """Whisper's rules for times, which are the tokens after ``<|notimestamps|>``.

    They come in pairs, except the first of a path and one before its end, and never decrease; a
    path begins with one. If all times together are more probable than the most probable other
    token, one of them follows (Radford et al. 2022, section 3.8 and their code).
    """

    raises = True  # every time counts, also one that a top-k head has left out

    def __init__(self, config: DecodingConfig) -> None:
        no_timestamps = config.no_timestamps_token_id
        assert no_timestamps is not None  # the caller has asked
        last = config.last_timestamp_token_id
        self._first = no_timestamps + 1
        self._stop = None if last is None else last + 1  # tokens from there on are those of texts
        self._max_initial_index = config.max_initial_timestamp_index
        self._end = min(config.eos_ids, default=no_timestamps)  # below it are tokens of texts

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        paths, nodes = candidates.paths, candidates.nodes
        for row, (node, num_new) in enumerate(
            zip(nodes.tolist(), paths.num_new(nodes).tolist(), strict=True)
        ):
            tokens = None if candidates.tokens is None else candidates.tokens[row]
            new = paths.path(node)[paths.num_prompt :] if num_new else np.arange(0)
            for begin, end in self._forbidden(new):
                scores[row, _between(tokens, begin, end)] = -np.inf
            self._prefer_times(scores[row], tokens)
        return scores

    def _forbidden(self, new: Tokens) -> Iterator[tuple[int, int | None]]:
        """Yield the first and the end of ranges of tokens that may not follow new ones."""
        first, stop = self._first, self._stop
        yield first - 1, first
        if not len(new):
            yield 0, first
            if stop is not None:
                yield stop, None
            if self._max_initial_index is not None:
                yield first + self._max_initial_index + 1, None
            return
        is_time = new >= first
        if stop is not None:
            is_time &= new < stop
        is_after_time = is_time[-1]
        is_after_pair = is_after_time and (len(new) == 1 or is_time[-2])
        if is_after_pair:
            yield first, stop
        elif is_after_time:
            yield 0, self._end
            if stop is not None:
                yield stop, None
        times = new[is_time]
        if len(times):  # the second of a pair may be as the first
            yield first, int(times[-1]) + (not is_after_time or is_after_pair)

    def _prefer_times(self, scores: NDArray[np.float64], tokens: Tokens | None) -> None:
        """Leave the times alone if they are more probable than every other token."""
        of_times = _between(tokens, self._first, self._stop)
        others = [_between(tokens, 0, self._first)]
        if self._stop is not None:
            others.append(_between(tokens, self._stop, None))
        times = scores[of_times]
        largest = times.max(initial=-np.inf)
        if largest == -np.inf:
            return
        together = largest + np.log(np.exp(times - largest).sum())
        if together > max(float(scores[part].max(initial=-np.inf)) for part in others):
            for part in others:
                scores[part] = -np.inf


def _between(tokens: Tokens | None, begin: int, end: int | None) -> slice | NDArray[np.bool_]:
    """Return the places of tokens ``begin`` to ``end - 1`` of one path; None: of all from there."""
    if tokens is None:
        return slice(begin, end)
    is_after = tokens >= begin
    return is_after if end is None else is_after & (tokens < end)
