"""Logits processors: penalties, bans and biases, as functions of the path (docs/algorithm.md 3.8).

Each changes the scores of the next token of many paths at once; their meaning and order are those
of transformers' processors of the same names, presence and frequency penalty OpenAI's. The scores
are raw logits, or for rule "search" raw log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.path_states import Nodes, PathTokens, Tokens
from dsbd_ort.decoding.option_values import shown

Scores = NDArray[np.float64]
"""(num_paths, n): of all tokens, or of the candidates that an engine with a top-k head returned."""


class Candidates:
    """The next-token candidates of many paths, whose scores processors change.

    Attributes:
        paths, nodes: the paths are those of these nodes, (num_paths,) int64.
        tokens: (num_paths, n) int64, -1 behind the last candidate; None: all by id, n = vocab_size.
        vocab_size: V.
    """

    def __init__(
        self, paths: PathTokens, nodes: Nodes, tokens: Tokens | None, vocab_size: int
    ) -> None:
        self.paths = paths
        self.nodes = nodes
        self.tokens = tokens
        self.vocab_size = vocab_size

    def of(self, by_token: NDArray[Any]) -> NDArray[Any]:
        """Return the entries of a (vocab_size,) array that belong to the candidates.

        (num_paths, n), or (1, n) where all tokens are candidates.
        """
        return by_token[None] if self.tokens is None else by_token[self.tokens]

    @cached_property
    def new_counts(self) -> NDArray[np.int64]:
        """How often each candidate is among its path's new tokens, (num_paths, n) int64."""
        num_columns = self.vocab_size if self.tokens is None else self.tokens.shape[1]
        counts = np.zeros((len(self.nodes), num_columns), dtype=np.int64)
        counts += self.of(self.paths.shared_counts)
        np.add.at(counts, self.places(*self.paths.own(self.nodes)), 1)
        return counts

    @property
    def is_seen(self) -> NDArray[np.bool_]:
        """Which candidates are in the prompt or in their path, (num_paths, n) bool."""
        is_seen: NDArray[np.bool_] = (self.new_counts > 0) | self.of(self.paths.prompt_counts > 0)
        return is_seen

    def places(
        self, rows: NDArray[np.int64], tokens: Tokens
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return row and column of the candidates among these (path, token) pairs."""
        if self.tokens is None:
            return rows, tokens
        keys, order = self._sorted_keys
        wanted = rows * self.vocab_size + tokens
        place = keys.searchsorted(wanted)
        is_found = keys.take(place, mode="clip") == wanted
        found = order[place[is_found]]
        return np.divmod(found, self.tokens.shape[1])

    @cached_property
    def _sorted_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert self.tokens is not None
        first = np.arange(len(self.tokens))[:, None] * self.vocab_size
        keys = np.where(self.tokens >= 0, first + self.tokens, -1).ravel()
        order = keys.argsort()
        return keys[order], order


class LogitsProcessor(Protocol):
    """A deterministic function of the path that changes the scores of the next token."""

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """Return the changed scores, (num_paths, n); may change ``scores`` in place."""

    def may_raise(self, candidates: Candidates) -> NDArray[np.bool_] | bool:
        """Return for which paths a score may rise: one bool, or (num_paths,).

        Candidates that a top-k head did not return may then overtake those that it did.
        """


class Bias:
    """Adds a constant to the scores of some tokens: logit_bias, suppress_tokens, single bad words.

    A bias of -inf forbids a token.
    """

    def __init__(self, bias_by_token: Sequence[tuple[int, float]], vocab_size: int) -> None:
        """Take (token, bias) pairs."""
        self._biases = np.zeros(vocab_size)
        for token, bias in bias_by_token:
            self._biases[token] += bias
        self._may_raise = any(bias > 0.0 for _, bias in bias_by_token)

    @classmethod
    def ban(cls, tokens: Iterable[int], vocab_size: int) -> Bias:
        """Return the processor that forbids these tokens."""
        return cls([(token, -np.inf) for token in tokens], vocab_size)

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        scores += candidates.of(self._biases)
        return scores

    def may_raise(self, candidates: Candidates) -> bool:
        """See LogitsProcessor.may_raise."""
        return self._may_raise


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive scores of tokens that prompt or path hold by it, multiplies negative ones.

    Keskar et al. 2019 (CTRL), section 4.1.
    """

    penalty: float

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        penalised = np.where(scores < 0.0, scores * self.penalty, scores / self.penalty)
        return np.where(candidates.is_seen, penalised, scores)

    def may_raise(self, candidates: Candidates) -> bool:
        """See LogitsProcessor.may_raise."""
        return self.penalty < 1.0


@dataclass(frozen=True)
class CountPenalty:
    """Subtracts ``presence`` from tokens among the new ones, ``frequency`` for each time."""

    presence: float
    frequency: float

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        counts = candidates.new_counts
        scores -= self.presence * (counts > 0) + self.frequency * counts
        return scores

    def may_raise(self, candidates: Candidates) -> bool:
        """See LogitsProcessor.may_raise."""
        return self.presence < 0.0 or self.frequency < 0.0


class _Ban:
    """Base of the processors that forbid tokens: no score rises."""

    def may_raise(self, candidates: Candidates) -> bool:
        """See LogitsProcessor.may_raise."""
        return False


class NoRepeatNgram(_Ban):
    """Forbids the token that would make an n-gram which prompt and path hold already.

    What followed each (n-1)-gram of the shared tokens is kept in a table as these grow; the own
    tokens of a path are few, and searched.
    """

    def __init__(self, size: int) -> None:
        """Take n, at least 1."""
        self._size = size
        self._next_tokens: dict[tuple[int, ...], list[int]] = {}
        self._num_known = 0  # shared tokens whose n-grams are in the table

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
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


class NoSourceNgram(_Ban):
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
        """See LogitsProcessor.process."""
        begun = candidates.paths.tail(candidates.nodes, self._size - 1)
        found = [self._next_tokens.get(ngram, []) for ngram in map(tuple, begun.tolist())]
        rows = np.repeat(np.arange(len(found)), [len(tokens) for tokens in found])
        banned = np.array([token for tokens in found for token in tokens], np.int64)
        scores[candidates.places(rows, banned)] = -np.inf
        return scores


class BadWords(_Ban):
    """Forbids the last token of a sequence of several where the path ends with those before it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Take sequences of at least two tokens."""
        self._sequences = [np.array(sequence, dtype=np.int64) for sequence in sequences]

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        for sequence in self._sequences:
            tail = candidates.paths.tail(candidates.nodes, len(sequence) - 1)
            rows = (tail == sequence[:-1]).all(axis=1).nonzero()[0]
            scores[candidates.places(rows, np.full(len(rows), sequence[-1]))] = -np.inf
        return scores


class MinNewTokens(_Ban):
    """Forbids the end-of-sequence tokens until a path has so many new tokens."""

    def __init__(self, number: int, eos: Tokens) -> None:
        self._number = number
        self._eos = eos

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        short = (candidates.paths.num_new(candidates.nodes) < self._number).nonzero()[0]
        rows = np.repeat(short, len(self._eos))
        scores[candidates.places(rows, np.tile(self._eos, len(short)))] = -np.inf
        return scores


class ForcedToken:
    """Allows one token alone, with score 0, where a path has a certain length."""

    def __init__(self, token: int | None, num_tokens: int) -> None:
        """Take the token and the path's length, the prompt included."""
        self._token = token
        self._num_tokens = num_tokens

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        forced = self._rows(candidates).nonzero()[0]
        scores[forced] = -np.inf
        scores[candidates.places(forced, np.full(len(forced), self._token))] = 0.0
        return scores

    def may_raise(self, candidates: Candidates) -> NDArray[np.bool_]:
        """See LogitsProcessor.may_raise."""
        return self._rows(candidates)

    def _rows(self, candidates: Candidates) -> NDArray[np.bool_]:
        paths = candidates.paths
        lengths = paths.num_new(candidates.nodes) + paths.num_prompt
        return np.asarray(lengths == self._num_tokens)


class BeginSuppress(_Ban):
    """Forbids tokens where a path has so many new tokens: as its first, or behind a forced one."""

    def __init__(self, tokens: Sequence[int], num_new: int) -> None:
        self._tokens = np.array(tokens, dtype=np.int64)
        self._num_new = num_new

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
        begun = (candidates.paths.num_new(candidates.nodes) == self._num_new).nonzero()[0]
        rows = np.repeat(begun, len(self._tokens))
        scores[candidates.places(rows, np.tile(self._tokens, len(begun)))] = -np.inf
        return scores


class Timestamps:
    """Whisper's rules of times, which are the tokens behind that of a text without them.

    They come in pairs, but for the first of a path and one before its end, and never decrease; a
    path begins with one. Where all times together are more probable than the most probable other
    token, one of them follows (Radford et al. 2022, section 3.8 and their code).
    """

    def __init__(self, no_timestamps: int, max_initial_index: int | None, lowest_end: int) -> None:
        """Take the token before the first time, the last time that may be first, and an end.

        lowest_end: the tokens below it are those of texts.
        """
        self._first = no_timestamps + 1
        self._max_initial_index = max_initial_index
        self._end = lowest_end

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
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
        first = self._first
        yield first - 1, first
        if not len(new):
            yield 0, first
            if self._max_initial_index is not None:
                yield first + self._max_initial_index + 1, None
            return
        is_behind_time = new[-1] >= first
        is_behind_pair = is_behind_time and (len(new) == 1 or new[-2] >= first)
        if is_behind_pair:
            yield first, None
        elif is_behind_time:
            yield 0, self._end
        times = new[new >= first]
        if len(times):  # the second of a pair may be as the first
            yield first, int(times[-1]) + (not is_behind_time or is_behind_pair)

    def _prefer_times(self, scores: NDArray[np.float64], tokens: Tokens | None) -> None:
        """Leave the times alone where they are more probable than every other token.

        scores, tokens: (n,). Of one path; changed in place.
        """
        of_times, others = _between(tokens, self._first, None), _between(tokens, 0, self._first)
        times = scores[of_times]
        largest = times.max(initial=-np.inf)
        if largest == -np.inf:
            return
        together = largest + np.log(np.exp(times - largest).sum())
        if together > scores[others].max(initial=-np.inf):
            scores[others] = -np.inf

    def may_raise(self, candidates: Candidates) -> bool:
        """Return True: every time counts, also one that a top-k head has left out."""
        return True


def _between(tokens: Tokens | None, begin: int, end: int | None) -> slice | NDArray[np.bool_]:
    """Return the places of tokens ``begin`` to ``end - 1`` of one path; None: of all from there."""
    if tokens is None:
        return slice(begin, end)
    is_behind = tokens >= begin
    return is_behind if end is None else is_behind & (tokens < end)


UserProcessor = Callable[[NDArray[np.int64], NDArray[np.float64]], NDArray[np.float64]]
"""(path, scores) -> scores: the prompt and the new tokens, (num_tokens,) int64; (vocab_size,).

Tokens that cannot be drawn, or that a draft's top-k head left out, have the score -inf."""


class PathFunction:
    """A user's own function of one path and its scores, called for each; it sees all tokens."""

    def __init__(self, function: UserProcessor) -> None:
        """Take a deterministic function; it may change the scores in place and must return them."""
        self._function = function

    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """See LogitsProcessor.process."""
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

    def may_raise(self, candidates: Candidates) -> bool:
        """See LogitsProcessor.may_raise."""
        return True

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
    bad_words = config.bad_sequences
    longer = [word for word in bad_words if len(word) > 1]
    last = num_prompt + config.max_new_tokens - 1
    is_first_forced = config.forced_bos_token_id is not None and num_prompt == 1
    by_need: list[tuple[object, Callable[[], LogitsProcessor]]] = [
        (config.biases, lambda: Bias(config.biases, vocab_size)),
        (config.repetition_penalty != 1.0, lambda: RepetitionPenalty(config.repetition_penalty)),
        (
            config.presence_penalty or config.frequency_penalty,
            lambda: CountPenalty(config.presence_penalty, config.frequency_penalty),
        ),
        (config.no_repeat_ngram_size, lambda: NoRepeatNgram(config.no_repeat_ngram_size)),
        (source_size, lambda: NoSourceNgram(source_size, source, vocab_size)),
        (
            len(bad_words) > len(longer),
            lambda: Bias.ban([word[0] for word in bad_words if len(word) == 1], vocab_size),
        ),
        (longer, lambda: BadWords(longer)),
        (config.min_new_tokens and len(eos), lambda: MinNewTokens(config.min_new_tokens, eos)),
        (
            config.forced_bos_token_id is not None,
            lambda: ForcedToken(config.forced_bos_token_id, 1),
        ),
        (
            config.forced_eos_token_id is not None,
            lambda: ForcedToken(config.forced_eos_token_id, last),
        ),
        (config.suppressed_ids, lambda: Bias.ban(config.suppressed_ids, vocab_size)),
        (
            config.suppressed_first_ids,
            lambda: BeginSuppress(config.suppressed_first_ids, is_first_forced),
        ),
        (config.no_timestamps_token_id is not None, lambda: _timestamps(config)),
    ]
    found = [make() for is_needed, make in by_need if is_needed]
    return found + [PathFunction(function) for function in config.logits_processors]


def _timestamps(config: DecodingConfig) -> Timestamps:
    no_timestamps = config.no_timestamps_token_id
    assert no_timestamps is not None  # the caller has asked
    lowest_end = min(config.eos_ids, default=no_timestamps)
    return Timestamps(no_timestamps, config.max_initial_timestamp_index, lowest_end)
