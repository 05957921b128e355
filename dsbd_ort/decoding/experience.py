"""What the policy "throughput" has learned: how often a gap was enough, how fast tokens come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_GAP_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0])
_GAP_CENTRES = np.concatenate([_GAP_EDGES - 0.5 * np.diff(_GAP_EDGES, prepend=0.0), [8.0]])
_FIRST_GUESS = 1.0 - 0.5 * np.exp(-_GAP_CENTRES)  # half without a gap, more the wider the gap
_GUESS_WEIGHT = 2.0  # observations that the first guess counts for, always
_MEMORY = 0.985  # weight that a layer's observations keep when another comes
FIRST_PROBE, LAST_PROBE = 8, 64  # iterations without a draft after which one layer is tried


@dataclass
class Experience:
    """How often a gap was enough, and how fast tokens come; kept from request to request.

    Attributes:
        enough, seen: (2, num_bins) float64. Weighted layers, by gap, that were accepted, and all:
            first layers of a draft, and those behind an accepted one, which are harder.
        rates: (2, num_bins) float64. What follows from them: a wider gap is never worse.
        tokens, seconds: committed and spent, the latest counting most; their ratio is lambda.
        acceptance, rows: running means of what chosen layers promised and held.
        is_stale: whether more was learned since ``rates`` were taken.
        num_without, probe_after: iterations without a draft, and after how many to try one.
    """

    enough: Floats
    seen: Floats
    rates: Floats
    tokens: float = 0.0
    seconds: float = 0.0
    acceptance: float = 0.7
    rows: float = 0.0
    is_stale: bool = False
    num_without: int = 0
    probe_after: int = FIRST_PROBE

    @classmethod
    def initial(cls) -> Experience:
        """Return what is known before the first layer."""
        rates = np.tile(_FIRST_GUESS, (2, 1))
        seen = np.full(rates.shape, _GUESS_WEIGHT)
        return cls(enough=seen * rates, seen=seen, rates=rates)

    def accepted(self, gaps: Floats, depth: int) -> Floats:
        """Return the estimated probability that a layer with this gap is accepted.

        depth: drafted layers before it.
        """
        rates: Floats = self.rates[min(depth, 1)][np.searchsorted(_GAP_EDGES, gaps)]
        return rates

    def learn(self, gaps: Floats, was_enough: NDArray[np.bool_], depth: int) -> None:
        """Count one layer: for every width it might have had, the gap and whether it was enough."""
        kind, size = min(depth, 1), self.seen.shape[1]
        bins = np.searchsorted(_GAP_EDGES, gaps)
        enough, seen = self.enough[kind], self.seen[kind]
        enough += (1.0 - _MEMORY) * (_GUESS_WEIGHT * _FIRST_GUESS - enough)
        seen += (1.0 - _MEMORY) * (_GUESS_WEIGHT - seen)
        enough += np.bincount(bins, was_enough, minlength=size)
        seen += np.bincount(bins, minlength=size)
        self.is_stale = True

    def refresh(self) -> None:
        """Bring ``rates`` up to date with what was learned."""
        if self.is_stale:
            for kind, (enough, seen) in enumerate(zip(self.enough, self.seen, strict=True)):
                self.rates[kind] = _never_falling(enough, seen)
            self.is_stale = False


def _never_falling(enough: Floats, seen: Floats) -> Floats:
    """Return the rates enough / seen, pooled over neighbours until none is below the one before.

    Isotonic regression (pool adjacent violators): [1/2, 3/4, 1/4] becomes [1/2, 4/8, 4/8]. Without
    it the best of many noisy rates would be believed.
    """
    pools: list[tuple[float, float, int]] = []
    for pool in zip(enough.tolist(), seen.tolist(), [1] * len(seen), strict=True):
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    return np.repeat([pool[0] / pool[1] for pool in pools], [pool[2] for pool in pools])
