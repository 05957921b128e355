"""The joint law over (beam, token) candidates: P(i, v) = w_i * p~(v | x_i) (ALGORITHM.md 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.warp import AnyLaw, TokenLaw

_ALL = slice(None)
STAY = -1
"""The "token" by which an absorbing beam continues: it stays what it is, with probability 1."""


@dataclass(frozen=True)
class JointLaw:
    """The joint law of draft or target over candidates, unnormalised, in logs.

    Attributes:
        nodes: (num_beams,) the nodes that ``parents`` counts.
        laws: (num_beams,) their token laws.
        parents: (num_candidates,) int64. Index of the candidate's beam.
        tokens: (num_candidates,) int64. STAY for an absorbing beam.
        log_weights: (num_candidates,) float64. log w_i + log p~(v | x_i): the child's weight.
        log_masses: (num_candidates,) float64. The same times the copies of the beam: what draws
            go by.
    """

    nodes: list[int]
    laws: list[AnyLaw]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_weights: NDArray[np.float64]
    log_masses: NDArray[np.float64]

    def raw_log_probs(self, chosen: NDArray[np.int64]) -> list[float]:
        """Return the unwarped log-probability of the token of every chosen candidate."""
        first = self.parents.searchsorted(np.arange(len(self.laws)))  # candidate of every beam
        parents = self.parents[chosen]
        places = (chosen - first[parents]).tolist()
        return [
            self.laws[parent].raw_log_prob(place)
            for parent, place in zip(parents.tolist(), places, strict=True)
        ]

    def probabilities(self) -> NDArray[np.float64]:
        """Return the normalised law, (num_candidates,) float64."""
        masses = np.exp(self.log_masses - self.log_masses.max())
        normalised: NDArray[np.float64] = masses / masses.sum()
        return normalised

    def candidate_ids(self, chosen: NDArray[np.int64] | slice = _ALL) -> NDArray[np.int64]:
        """Return one number for each of the chosen candidates, (num_chosen,) int64.

        It is the same in every law: the node is in the upper half, the token (STAY is -1) plus one
        in the lower.
        """
        nodes = np.array(self.nodes, dtype=np.int64)
        numbers: NDArray[np.int64] = (nodes[self.parents[chosen]] << 32) + self.tokens[chosen] + 1
        return numbers

    def aligned_to(self, other: JointLaw) -> NDArray[np.int64]:
        """Return for every candidate of ``other`` its index in this law, -1 where it has none."""
        ours, theirs = self.candidate_ids(), other.candidate_ids()
        order = np.argsort(ours)
        place = np.minimum(np.searchsorted(ours, theirs, sorter=order), len(ours) - 1)
        match = order[place]
        index: NDArray[np.int64] = np.where(ours[match] == theirs, match, -1)
        return index


_FEW_CANDIDATES = 4096
_STAY_LAW = TokenLaw(np.array([STAY]), np.zeros(1), np.zeros(1))


def joint_law(
    nodes: list[int],
    log_weights: NDArray[np.float64],
    copies: list[int],
    laws: Sequence[AnyLaw | None],
) -> JointLaw:
    """Combine beam weights and token laws; None stands for an absorbing beam."""
    full = [_STAY_LAW if law is None else law for law in laws]
    num_tokens = tuple([len(law.tokens) for law in full])
    few = sum(num_tokens) <= _FEW_CANDIDATES
    parents = _parents(num_tokens) if few else np.repeat(np.arange(len(full)), num_tokens)
    weights = np.concatenate([law.log_probs for law in full])
    weights += log_weights[parents]
    return JointLaw(
        nodes=nodes,
        laws=full,
        parents=parents,
        tokens=np.concatenate([law.tokens for law in full]),
        log_weights=weights,
        log_masses=weights if max(copies) == 1 else weights + np.log(copies)[parents],
    )


@lru_cache(maxsize=64)  # the same few shapes come in every layer
def _parents(num_tokens: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the beam of every candidate: (2, 3) gives [0, 0, 1, 1, 1]."""
    parents = np.repeat(np.arange(len(num_tokens)), num_tokens)
    parents.flags.writeable = False
    return parents
