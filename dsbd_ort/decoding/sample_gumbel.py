"""Rule "sample", coupling "gumbel" (ALGORITHM.md 3.1): draft and target see the same noise.

By the Gumbel-top-k theorem (Kool et al. 2019, section 2.3) the n candidates of largest
log P + G, in that order, are n sequential draws without replacement from P. G belongs to (seed,
path, token, step), not to a model, so the draft's candidates are the target's wherever the two
laws are close (Daliri et al. 2024), and the output depends on the target alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import JointLaw
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.noise import gumbel_noise


def draw_gumbel(
    forest: Forest, nodes: list[int], law: JointLaw, num_draws: int, step: int
) -> NDArray[np.int64]:
    """Draw candidates without replacement by the noise that belongs to them.

    Args:
        forest: gives the path keys.
        nodes: (num_beams,) the nodes that ``law.parents`` counts.
        law: joint law of draft or target.
        num_draws: how many to draw; fewer come back if fewer have positive probability.
        step: number of the layer, counted from the prompt.

    Returns:
        (<= num_draws,) int64 candidates in the order drawn.
    """
    scores = law.log_probs + gumbel_noise(forest.candidate_keys(nodes, law), step)
    if num_draws < len(scores):
        best = np.argpartition(scores, len(scores) - num_draws)[-num_draws:]
    else:
        best = np.arange(len(scores))
    drawn: NDArray[np.int64] = best[np.argsort(-scores[best], kind="stable")]
    return drawn[np.isfinite(scores[drawn])]
