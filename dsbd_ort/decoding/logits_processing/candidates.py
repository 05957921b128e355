"""Next-token candidates of many paths, and what a logits processor is."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.logits_processing.path_states import Nodes, PathTokens, Tokens

Scores = NDArray[np.float64]
"""(num_paths, n): of all tokens, or of the candidates that an engine with a top-k head returned."""

_LARGEST = 1e30  # of a score: sums of such scores, and quotients by a temperature, stay finite


def given_scores(scores: Scores) -> Scores | None:
    """Return scores that a caller's function gives; None: NaN, or more than 1e30.

    Finite scores below -1e30, with which functions forbid tokens, become -1e30.
    """
    if not (scores <= _LARGEST).all():
        return None
    is_low = scores < -_LARGEST
    if not is_low.any():
        return scores
    return np.where(is_low & (scores != -np.inf), -_LARGEST, scores)


class Candidates:
    """The next-token candidates of many paths, whose scores processors change.

    paths, nodes: the paths are those of these nodes, (num_paths,) int64.
    tokens: (num_paths, n) int64, padded with -1; None: all by id, n = vocab_size.
    """

    def __init__(
        self, paths: PathTokens, nodes: Nodes, tokens: Tokens | None, vocab_size: int
    ) -> None:
        self.paths, self.nodes = paths, nodes
        self.tokens, self.vocab_size = tokens, vocab_size

    def of(self, by_token: NDArray[Any]) -> NDArray[Any]:
        """Return the candidates' entries of a (vocab_size,) array, (num_paths, n) or (1, n)."""
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
        flat_places = order[place[is_found]]
        return np.divmod(flat_places, self.tokens.shape[1])

    @cached_property
    def _sorted_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert self.tokens is not None
        first = np.arange(len(self.tokens))[:, None] * self.vocab_size
        keys = np.where(self.tokens >= 0, first + self.tokens, -1).ravel()
        order = keys.argsort()
        return keys[order], order


class LogitsProcessor(ABC):
    """A deterministic function of the path that changes the scores of the next token."""

    raises = False  # a score; candidates that a top-k head left out may then overtake others

    @abstractmethod
    def process(self, scores: Scores, candidates: Candidates) -> Scores:
        """Return the changed scores, (num_paths, n); may change ``scores`` in place."""

    def may_raise(self, candidates: Candidates) -> NDArray[np.bool_] | bool:
        """Return for which paths a score may rise: one bool, or (num_paths,)."""
        return self.raises
