"""Joint distributions of (beam, token) candidates, and the best of them (docs/algorithm.md 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.distribution import TokenDistribution, TopDistribution

STAY = -1
"""The "token" by which an absorbing beam continues: it stays what it is, with probability 1."""

_ALL = slice(None)


@dataclass(frozen=True)
class JointDistribution:
    """P(i, v) = w_i * p~(v | x_i) of draft or target, unnormalised, in logs.

    Attributes:
        nodes: (num_beams,) the nodes that ``parents`` counts.
        distributions: (num_beams,) of their next tokens.
        parents: (num_candidates,) int64. Index of the candidate's beam.
        tokens: (num_candidates,) int64. STAY for an absorbing beam.
        log_weights: (num_candidates,) float64. log w_i + log p~(v | x_i): the child's weight.
        log_masses: (num_candidates,) float64. The same times the copies of the beam: what draws
            go by.
    """

    nodes: list[int]
    distributions: list[TokenDistribution]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_weights: NDArray[np.float64]
    log_masses: NDArray[np.float64]

    def raw_log_probs(self, chosen: NDArray[np.int64]) -> list[float]:
        """Return the unwarped log-probability of the token of every chosen candidate."""
        parents, found = self.parents, self.distributions
        first = [0, *accumulate([len(each.tokens) for each in found])]  # candidate of every beam
        return [
            found[parent].raw_log_prob(candidate - first[parent])
            for parent, candidate in zip(parents[chosen].tolist(), chosen.tolist(), strict=True)
        ]

    def probabilities(self) -> NDArray[np.float64]:
        """Return the normalised probabilities, (num_candidates,) float64."""
        masses = np.exp(self.log_masses - self.log_masses.max())
        normalised: NDArray[np.float64] = masses / masses.sum()
        return normalised

    def candidate_ids(self, chosen: NDArray[np.int64] | slice = _ALL) -> NDArray[np.int64]:
        """Return one number for each of the chosen candidates, (num_chosen,) int64.

        It is the same in every joint distribution: the node is in the upper half, the token
        (STAY is -1) plus one in the lower.
        """
        nodes = np.array(self.nodes, dtype=np.int64)
        numbers: NDArray[np.int64] = (nodes[self.parents[chosen]] << 32) + self.tokens[chosen] + 1
        return numbers

    def aligned_to(self, other: JointDistribution) -> NDArray[np.int64]:
        """Return for every candidate of ``other`` its index in this one, -1 where it has none."""
        ours, theirs = self.candidate_ids(), other.candidate_ids()
        order = np.argsort(ours)
        place = np.minimum(np.searchsorted(ours, theirs, sorter=order), len(ours) - 1)
        match = order[place]
        index: NDArray[np.int64] = np.where(ours[match] == theirs, match, -1)
        return index


_FEW_CANDIDATES = 4096
_STAY = TopDistribution(np.array([STAY]), np.zeros(1), np.zeros(1))


def joint_distribution(
    nodes: list[int],
    log_weights: NDArray[np.float64],
    copies: list[int],
    distributions: Sequence[TokenDistribution | None],
) -> JointDistribution:
    """Combine beam weights and next-token distributions; None stands for an absorbing beam."""
    full = [_STAY if each is None else each for each in distributions]
    num_tokens = tuple([len(each.tokens) for each in full])
    few = sum(num_tokens) <= _FEW_CANDIDATES
    parents = _parents(num_tokens) if few else np.repeat(np.arange(len(full)), num_tokens)
    weights = np.concatenate([each.log_probs for each in full])
    weights += log_weights[parents]
    return JointDistribution(
        nodes=nodes,
        distributions=full,
        parents=parents,
        tokens=np.concatenate([each.tokens for each in full]),
        log_weights=weights,
        log_masses=weights if max(copies) == 1 else weights + np.log(copies)[parents],
    )


@lru_cache(maxsize=64)  # the same few shapes recur in every layer
def _parents(num_tokens: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the beam of every candidate: (2, 3) gives [0, 0, 1, 1, 1]."""
    parents = np.repeat(np.arange(len(num_tokens)), num_tokens)
    parents.flags.writeable = False
    return parents


_SORTED_WHOLE = 256  # up to here sorting all candidates is faster than finding the best first


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
