"""A scorer given by a function of the path, for tests; its states are hashes of the paths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PRIME = 1_000_003


@dataclass(frozen=True)
class PathScorer:
    """Adds numbers from -1.5 to ``most`` that depend on the whole path and the next token."""

    vocab_size: int
    most: float = 1.0
    has_highest: bool = False

    name = "the test's scorer"

    def start(self, prompt_ids: Sequence[int]) -> NDArray[np.int64]:
        states = np.array([1])
        for token in prompt_ids:
            states = self.advance(states, np.array([token]))
        return states

    def advance(self, states: NDArray[Any], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return (states * 31 + tokens + 1) % _PRIME

    def scores(self, states: NDArray[Any], tokens: NDArray[np.int64] | None) -> NDArray[np.float64]:
        read = np.arange(self.vocab_size)[None] if tokens is None else tokens
        spread = (states[:, None] * 7919 + read * 104_729) % 1009 / 1008
        return (self.most + 1.5) * spread - 1.5

    def __getattr__(self, name: str) -> Any:
        if name == "highest" and self.has_highest:
            return lambda states: np.full(len(states), self.most)
        raise AttributeError(name)


def scorer_of_path(scorer: PathScorer, path: Sequence[int]) -> NDArray[np.float64]:
    """Return what it adds to every next token, (vocab_size,)."""
    return scorer.scores(scorer.start(path), None)[0]
