"""The joint law over (beam, token) candidates: P(i, v) = w_i * p~(v | x_i) (ALGORITHM.md 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.warp import TokenLaw

STAY = -1
"""The "token" by which an absorbing beam continues: it stays what it is, with probability 1."""


@dataclass(frozen=True)
class JointLaw:
    """The joint law of draft or target over candidates, unnormalised, in logs.

    Attributes:
        nodes: (num_beams,) the nodes that ``parents`` counts.
        parents: (num_candidates,) int64. Index of the candidate's beam.
        tokens: (num_candidates,) int64. STAY for an absorbing beam.
        log_weights: (num_candidates,) float64. log w_i + log p~(v | x_i): the child's weight.
        log_masses: (num_candidates,) float64. The same times the copies of the beam: what draws
            go by.
        raw_log_probs: (num_candidates,) float64. Unwarped log-probability of the token alone.
    """

    nodes: list[int]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_weights: NDArray[np.float64]
    log_masses: NDArray[np.float64]
    raw_log_probs: NDArray[np.float64]

    def probabilities(self) -> NDArray[np.float64]:
        """Return the normalised law, (num_candidates,) float64."""
        masses = np.exp(self.log_masses - self.log_masses.max())
        normalised: NDArray[np.float64] = masses / masses.sum()
        return normalised

    def candidate_ids(self) -> NDArray[np.int64]:
        """Return one number per candidate, (num_candidates,) int64, the same in every law.

        The node is in the upper half, the token (STAY is -1) plus one in the lower.
        """
        nodes = np.array(self.nodes, dtype=np.int64)
        numbers: NDArray[np.int64] = (nodes[self.parents] << 32) + self.tokens + 1
        return numbers

    def aligned_to(self, other: JointLaw) -> NDArray[np.int64]:
        """Return for every candidate of ``other`` its index in this law, -1 where it has none."""
        ours, theirs = self.candidate_ids(), other.candidate_ids()
        order = np.argsort(ours)
        place = np.minimum(np.searchsorted(ours, theirs, sorter=order), len(ours) - 1)
        match = order[place]
        index: NDArray[np.int64] = np.where(ours[match] == theirs, match, -1)
        return index


_STAY_LAW = TokenLaw(np.array([STAY]), np.zeros(1), np.zeros(1))


def joint_law(
    nodes: list[int],
    log_weights: NDArray[np.float64],
    copies: NDArray[np.int64],
    laws: Sequence[TokenLaw | None],
) -> JointLaw:
    """Combine beam weights and token laws; None stands for an absorbing beam."""
    full = [law or _STAY_LAW for law in laws]
    parents = np.repeat(np.arange(len(full)), [len(law.tokens) for law in full])
    weights = np.concatenate([law.log_probs for law in full]) + log_weights[parents]
    return JointLaw(
        nodes=nodes,
        parents=parents,
        tokens=np.concatenate([law.tokens for law in full]),
        log_weights=weights,
        log_masses=weights if (copies == 1).all() else weights + np.log(copies)[parents],
        raw_log_probs=np.concatenate([law.raw_log_probs for law in full]),
    )
