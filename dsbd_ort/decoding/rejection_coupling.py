"""Rule "sample", coupling "rejection" (ALGORITHM.md 3.2): the paper's scheme, made exact.

    p: the target's joint law P_t, q: the draft's Q_t, R: the residual, O: the outputs.

Exact because, given the whole history, candidate s_j has law q_j and the output in progress has
law R, and one step of speculative sampling (Leviathan et al. 2023, theorem 3.5) keeps that law.
Nothing may look at a drawn candidate before its turn. The published code draws drafts without
replacement but verifies as if with replacement, and is biased.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.chance import Chance
from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.joint_law import JointLaw

Floats = NDArray[np.float64]


class RejectionCoupling:
    """Accepts or rejects the drafted candidates one by one.

    Computed descendants of the beams are dropped: drafts must be drawn afresh every iteration.
    """

    keeps_descendants = False
    reads_draft_laws = True
    draft_scores = None

    def __init__(self, chance: Chance, replacement: bool) -> None:
        self._chance = chance
        self._replacement = replacement

    def propose(self, law: JointLaw, num_draws: int, step: int) -> NDArray[np.int64]:
        """Draw the draft's candidates of one layer, in order, (<= num_draws,) int64."""
        q = law.probabilities()
        return self._fill([], q, q, num_draws)

    def choose(
        self, law: JointLaw, layer: DraftLayer | None, num_draws: int, step: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Return the outputs of a layer and whether all are accepted drafts.

        A layer behind the drafted ones (``layer`` None) draws from the target's law.
        """
        p = law.probabilities()
        if layer is None:
            return self._fill([], p, p, num_draws), False
        outputs, residual = self._accept(p, law, layer, num_draws)
        if len(outputs) == num_draws:
            return np.array(outputs, dtype=np.int64), True
        return self._fill(outputs, residual, p, num_draws), False

    def _accept(
        self, p: Floats, law: JointLaw, layer: DraftLayer, num_wanted: int
    ) -> tuple[list[int], Floats]:
        """Return the accepted candidates in order and the residual of the output in progress."""
        q = layer.law.probabilities()  # loses what was drawn, unless with replacement
        draft_index = layer.law.aligned_to(law)  # of the target's candidates
        target_index = law.aligned_to(layer.law)  # of the draft's candidates
        outputs: list[int] = []
        residual = p
        for s in layer.drawn.tolist():
            q_j = q / q.sum()
            here = int(target_index[s])  # -1: its parent was not accepted, so R is 0
            if here >= 0 and self._chance.happens(min(1.0, residual[here] / q_j[s])):
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
        """Draw the next output from the residual and the remaining from what is left of p.

        Where the residual is ``p`` itself, all are drawn alike.
        """
        if residual is not p and residual.any():
            outputs = [*outputs, self._chance.draw(residual)]
        num_more = num_wanted - len(outputs)
        if self._replacement:
            outputs = [*outputs, *(self._chance.draw(p) for _ in range(num_more))]
        elif num_more:
            rest = self._without(p, outputs)
            outputs = [*outputs, *self._chance.draw_distinct(rest, num_more).tolist()]
        return np.array(outputs, dtype=np.int64)

    def _without(self, p: Floats, outputs: list[int]) -> Floats:
        """Return p restricted to what may still be drawn; all zero if nothing is left."""
        if self._replacement:
            return p
        rest = p.copy()
        rest[outputs] = 0.0
        return _normalised(rest, rest)


def _normalised(masses: Floats, if_empty: Floats) -> Floats:
    """Return ``masses`` normalised; where nothing is left (probability zero), ``if_empty``."""
    total = masses.sum()
    return masses / total if total > 0.0 else if_empty
