"""Plain randomness behind two verbs, so that a test can walk through every outcome."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.gumbel_coupling import best_candidates

_SHORTEST_WAIT = 1e-300  # an exponential number may round to 0


class Chance(Protocol):
    """Coins and draws."""

    def happens(self, probability: float) -> bool:
        """Toss a coin that shows heads with ``probability``."""

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """Draw an index of a normalised distribution, (n,) float64, that has a positive one."""

    def draw_distinct(
        self, probabilities: NDArray[np.float64], num_draws: int
    ) -> NDArray[np.int64]:
        """Draw indices one after the other without replacement, (<= num_draws,) int64.

        Fewer than ``num_draws`` are returned if fewer have positive probability.
        """


class RandomChance:
    """Chance from a numpy generator.

    An index is drawn as the clock that rings first, index i after an exponential time of rate p_i;
    the clocks that ring next are the draws without replacement (the Gumbel-top-k theorem in other
    words). Unlike the inverse of the cumulative distribution, where the rounding of every
    probability moves all boundaries behind it, this tips only where two candidates nearly tie.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def happens(self, probability: float) -> bool:
        """See Chance.happens."""
        return bool(self._rng.random() < probability)

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """See Chance.draw."""
        return int(self.draw_distinct(probabilities, 1)[0])

    def draw_distinct(
        self, probabilities: NDArray[np.float64], num_draws: int
    ) -> NDArray[np.int64]:
        """See Chance.draw_distinct."""
        waits = self._rng.standard_exponential(len(probabilities))
        np.maximum(waits, _SHORTEST_WAIT, out=waits)
        first = best_candidates(probabilities / waits, num_draws)
        return first[probabilities[first] > 0.0]
