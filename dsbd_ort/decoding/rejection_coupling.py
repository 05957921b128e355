"""Rule "sample", coupling "rejection" (docs/algorithm.md 3.2): the paper's scheme, made exact.

    p: the target's joint distribution P_t, q: the draft's Q_t, R: the residual, O: the outputs.

Exact because, given the whole history, candidate s_j has law q_j and the output in progress has
law R, and one step of speculative sampling (Leviathan et al. 2023, theorem 3.5) keeps that law.
Nothing may look at a drawn candidate before its turn. The published code draws drafts without
replacement but verifies as if with replacement, and is biased.
"""

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.draft import DraftLayer
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates

Floats = NDArray[np.float64]
_SHORTEST_WAIT = 1e-300  # an exponential number may round to 0


class RandomSource:
    """Coins and draws of a numpy generator; tests enumerate every outcome instead.

    Index i is drawn after an exponential time of rate p_i: the shortest times are the draws without
    replacement (the Gumbel-top-k theorem in other words). Rounding changes a choice only if two
    candidates nearly tie; with the cumulative distribution it would move all boundaries.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def happens(self, probability: float) -> bool:
        """Toss a coin that shows heads with ``probability``."""
        return bool(self._rng.random() < probability)

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """Draw an index of a normalised distribution, (n,) float64, that has a positive one."""
        return int(self.draw_distinct(probabilities, 1)[0])

    def draw_distinct(
        self, probabilities: NDArray[np.float64], num_draws: int
    ) -> NDArray[np.int64]:
        """Draw indices of positive probability one by one, (<= num_draws,) int64, none twice."""
        waits = self._rng.standard_exponential(len(probabilities))
        np.maximum(waits, _SHORTEST_WAIT, out=waits)
        first = best_candidates(probabilities / waits, num_draws)
        return first[probabilities[first] > 0.0]


class RejectionCoupling:
    """Accepts or rejects the drafted candidates one by one.

    Computed descendants of the beams are dropped: drafts must be drawn afresh every iteration.
    """

    keeps_descendants = False
    reads_draft_distributions = True
    scores = None  # draws have none

    def __init__(self, source: RandomSource, replacement: bool) -> None:
        self._source, self._replacement = source, replacement

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Draw the draft's candidates of one layer, in order, (<= num_draws,) int64."""
        q = joint.probabilities()
        return self._fill([], q, q, num_draws)

    def choose(
        self, joint: JointDistribution, layer: DraftLayer | None, num_draws: int, depth: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Return the outputs of a layer, and whether all are accepted drafts: the next follows."""
        p = joint.probabilities()
        if layer is None:
            return self._fill([], p, p, num_draws), False
        outputs, residual = self._accept(p, joint, layer, num_draws)
        if len(outputs) == num_draws:
            return np.array(outputs, dtype=np.int64), True
        return self._fill(outputs, residual, p, num_draws), False

    def _accept(
        self, p: Floats, joint: JointDistribution, layer: DraftLayer, num_wanted: int
    ) -> tuple[list[int], Floats]:
        """Return the accepted candidates in order and the residual of the output in progress."""
        q = layer.distribution.probabilities()  # loses what was drawn, unless with replacement
        draft_index = layer.distribution.aligned_to(joint)  # of the target's candidates
        target_index = joint.aligned_to(layer.distribution)  # of the draft's candidates
        outputs: list[int] = []
        residual = p
        for s in layer.drawn.tolist():
            q_j = q / q.sum()
            here = int(target_index[s])  # -1: its parent was not accepted, so R is 0
            if here >= 0 and self._source.happens(min(1.0, residual[here] / q_j[s])):
                outputs.append(here)
                if len(outputs) == num_wanted:
                    break
                residual = self._without(p, outputs)
            else:
                q_here = np.where(draft_index >= 0, q_j[draft_index], 0.0)
                residual = _normalised(np.maximum(residual - q_here, 0.0), residual)
            if not self._replacement:
                q[s] = 0.0
        return outputs, residual

    def _fill(
        self, outputs: list[int], residual: Floats, p: Floats, num_wanted: int
    ) -> NDArray[np.int64]:
        """Draw the next output from the residual and the remaining from what is left of p."""
        if residual is not p and residual.any():
            outputs = [*outputs, self._source.draw(residual)]
        num_more = num_wanted - len(outputs)
        if self._replacement:
            outputs = [*outputs, *(self._source.draw(p) for _ in range(num_more))]
        elif num_more:
            rest = self._without(p, outputs)
            outputs = [*outputs, *self._source.draw_distinct(rest, num_more).tolist()]
        return np.array(outputs, dtype=np.int64)

    def _without(self, p: Floats, outputs: list[int]) -> Floats:
        """Return p restricted to what may still be drawn; all zero if nothing is left."""
        if self._replacement:
            return p
        rest = p.copy()
        rest[outputs] = 0.0
        return _normalised(rest, rest)


def _normalised(masses: Floats, if_empty: Floats) -> Floats:
    """Return ``masses`` normalised; if nothing is left (probability zero), ``if_empty``."""
    total = masses.sum()
    return masses / total if total > 0.0 else if_empty
