"""Rule "sample", coupling "gumbel" (ALGORITHM.md 3.1): draft and target see the same noise.

By the Gumbel-top-k theorem (Kool et al. 2019, section 2.3) the n candidates of largest
log P + G, in that order, are n sequential draws without replacement from P. G belongs to (seed,
path, token, step), not to a model, so the draft's candidates are the target's wherever the two
laws are close (Daliri et al. 2024), and the output depends on the target alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_law import JointLaw
from dsbd_ort.decoding.noise import gumbel_noise

_SORTED_WHOLE = 256  # up to here sorting all candidates is faster than finding the best first


class GumbelCoupling:
    """Draws candidates by the noise that belongs to them.

    Computed descendants of the beams stay in the forest: what is drafted never changes the output.
    """

    keeps_descendants = True
    reads_draft_laws = False

    def __init__(self, forest: Forest, replacement: bool) -> None:
        self._forest = forest
        self._replacement = replacement
        self.draft_scores = self._scores

    def propose(self, law: JointLaw, num_draws: int, step: int) -> NDArray[np.int64]:
        """Draw the draft's candidates of one layer, as ``draw``."""
        return self.draw(law, num_draws, step)

    def choose(
        self, law: JointLaw, layer: DraftLayer | None, num_draws: int, step: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Draw the target's candidates, whatever was drafted; always willing to go on."""
        return self.draw(law, num_draws, step), True

    def draw(self, law: JointLaw, num_draws: int, step: int) -> NDArray[np.int64]:
        """Return the drawn candidates in order, (<= num_draws,) int64.

        Fewer than ``num_draws`` come back if fewer have positive probability. With replacement,
        draw j has a noise of its own and takes the single best.
        """
        if self._replacement:
            keys = self._forest.candidate_keys(law)
            scores = [law.log_masses + gumbel_noise(keys, step, j) for j in range(num_draws)]
            return np.array([np.argmax(score) for score in scores])
        return best_candidates(self._scores(law, step), num_draws)

    def _scores(self, law: JointLaw, step: int) -> NDArray[np.float64]:
        """Return log P + G of every candidate, (num_candidates,) float64."""
        return law.log_masses + gumbel_noise(self._forest.candidate_keys(law), step)


def best_candidates(scores: NDArray[np.float64], num_wanted: int) -> NDArray[np.int64]:
    """Return the candidates of largest finite score, best first, (<= num_wanted,) int64.

    Equal scores go by index, so by beam and then by token: what comes first does not depend on
    how many are wanted.
    """
    if len(scores) <= _SORTED_WHOLE or not 0 < num_wanted < len(scores):
        best = (-scores).argsort(kind="stable")[:num_wanted]
    else:
        last = len(scores) - num_wanted
        best = (scores >= np.partition(scores, last)[last]).nonzero()[0]  # more where some tie
        best = best[(-scores[best]).argsort(kind="stable")[:num_wanted]]
    if len(best) and scores[best[-1]] == -np.inf:
        best = best[scores[best] > -np.inf]
    return best
