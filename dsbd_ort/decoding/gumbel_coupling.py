"""Rule "sample", coupling "gumbel" (docs/algorithm.md 3.1): draft and target see the same noise.

By the Gumbel-top-k theorem (Kool et al. 2019, section 2.3) the n candidates of largest
log P + G, in that order, are n sequential draws without replacement from P. G belongs to (seed,
path, token, depth), not to a model, so the draft's candidates are the target's wherever the two
laws are close (Daliri et al. 2024), and the output depends on the target alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.noise import gumbel_noise


class GumbelCoupling:
    """Draws candidates by the noise that belongs to them.

    Computed descendants of the beams stay in the forest: what is drafted never changes the output.
    """

    keeps_descendants = True
    reads_draft_distributions = False

    def __init__(self, forest: Forest, replacement: bool) -> None:
        self._forest = forest
        self._replacement = replacement

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Draw the draft's candidates of one layer, as ``draw``."""
        return self.draw(joint, num_draws, depth)

    def choose(
        self, joint: JointDistribution, layer: DraftLayer | None, num_draws: int, depth: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Draw the target's candidates, whatever was drafted; always willing to go on."""
        return self.draw(joint, num_draws, depth), True

    def draw(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Return the drawn candidates in order, (<= num_draws,) int64.

        Fewer than ``num_draws`` come back if fewer have positive probability. With replacement,
        draw j has a noise of its own and takes the single best.
        """
        if self._replacement:
            keys = self._forest.candidate_keys(joint)
            scores = [joint.log_masses + gumbel_noise(keys, depth, j) for j in range(num_draws)]
            return np.array([score.argmax() for score in scores])
        return best_candidates(self.scores(joint, depth), num_draws)

    def scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """Return log P + G of every candidate, (num_candidates,) float64."""
        return joint.log_masses + gumbel_noise(self._forest.candidate_keys(joint), depth)
