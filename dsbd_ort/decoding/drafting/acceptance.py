"""How often a drafted layer is accepted, learned by its gap, and what drafting was worth so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.cost_curve import LoopCost, never_falling

Floats = NDArray[np.float64]
_GAP_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0])
_GAP_CENTRES = np.concatenate([_GAP_EDGES - 0.5 * np.diff(_GAP_EDGES, prepend=0.0), [8.0]])
_FIRST_GUESS = 1.0 - 0.5 * np.exp(-_GAP_CENTRES)  # half without a gap, more the wider the gap
_GUESS_WEIGHT = 2.0  # observations that the first guess counts for, always
_MEMORY = 0.985  # weight that a layer's observations keep after another
FIRST_PROBE, LAST_PROBE = 8, 64  # iterations without a draft after which one layer is tried


@dataclass
class AcceptanceEstimator:
    """How often a gap was enough, and how fast tokens are committed; kept from request to request.

    Attributes:
        enough, seen: (2, num_bins) float64. Weighted layers, by gap, that were accepted, and all:
            of first layers of a draft, and of those behind an accepted one, which are harder.
        rates: (2, num_bins) float64. What follows from them: a wider gap is never worse.
        tokens, calls: expected of drafts, and the time they took in target calls of one row, the
            latest counting most; their ratio is lambda, whatever the calls are found to cost.
        acceptance, rows: running means of what chosen layers promised and held.
        credit: what drafts may still cost in vain, in iterations without one.
        is_stale: whether more was learned since ``rates`` were taken.
        num_without, probe_after: iterations without a draft, and after how many to try one.
        loop: what the loop itself costs in requests of these settings.
    """

    enough: Floats
    seen: Floats
    rates: Floats
    tokens: float = 0.0
    calls: float = 0.0
    acceptance: float = 0.7
    rows: float = 0.0
    credit: float = 0.0
    is_stale: bool = False
    num_without: int = 0
    probe_after: int = FIRST_PROBE
    loop: LoopCost = field(default_factory=LoopCost)

    @classmethod
    def initial(cls) -> AcceptanceEstimator:
        """Return what is known before the first layer."""
        rates = np.tile(_FIRST_GUESS, (2, 1))
        seen = np.full(rates.shape, _GUESS_WEIGHT)
        return cls(enough=seen * rates, seen=seen, rates=rates)

    def accepted(self, gaps: Floats, depth: int) -> Floats:
        """Return the estimated probability that a layer with this gap is accepted.

        depth: drafted layers before it.
        """
        rates: Floats = self.rates[min(depth, 1)][_GAP_EDGES.searchsorted(gaps)]
        return rates

    def learn(self, gaps: Floats, was_enough: NDArray[np.bool_], depth: int) -> None:
        """Count one layer: for every width it might have had, the gap and whether it was enough."""
        kind, size = min(depth, 1), self.seen.shape[1]
        bins = _GAP_EDGES.searchsorted(gaps)
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
                # Else the best of many noisy rates would be believed.
                self.rates[kind] = never_falling(enough, seen)
            self.is_stale = False
