"""Plain randomness behind two verbs, so that a test can walk through every outcome."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Chance(Protocol):
    """Coins and draws."""

    def happens(self, probability: float) -> bool:
        """Toss a coin that shows heads with ``probability``."""

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """Draw an index from a normalised law, (n,) float64."""


class RandomChance:
    """Chance from a numpy generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def happens(self, probability: float) -> bool:
        """See Chance.happens."""
        return bool(self._rng.random() < probability)

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """See Chance.draw; an index of probability zero is never drawn."""
        cumulative = probabilities.cumsum()
        place = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(min(place, np.flatnonzero(probabilities)[-1]))
