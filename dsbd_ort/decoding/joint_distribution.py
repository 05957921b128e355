"""Joint distributions of (beam, token) candidates, and the best of them (docs/algorithm.md 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.distribution import ListedDistributions, TokenDistributions

STAY = -1
"""The "token" by which an absorbing beam continues: it stays what it is, with probability 1."""

UPPER_HALF = 32  # a shift


@dataclass(slots=True)
class JointDistribution:
    """P(i, v) = w_i * p~(v | x_i) of draft or target, unnormalised, in logs.

    Candidates are numbered by beam, then by token.

    nodes: (num_beams,) int64. The nodes that ``parents`` counts.
    parents: (num_candidates,) int64. Index of the candidate's beam.
    tokens: (num_candidates,) int64. STAY for an absorbing beam.
    log_weights: (num_candidates,) float64. log w_i + log p~(v | x_i): the child's weight.
    log_masses: (num_candidates,) float64. The same times the copies of the beam, for draws.
    raw_log_probs: (num_candidates,) float64. Unwarped log-probability of the token.
    num_tokens: candidates of each beam, 0 if not all have as many.
    path_keys: (num_candidates,) uint64. See ``Forest.candidate_keys``; None: not computed yet.
    log_unlisted: log mass of all other continuations, of a draft that lists only some.
    """

    nodes: NDArray[np.int64]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_weights: NDArray[np.float64]
    log_masses: NDArray[np.float64]
    raw_log_probs: NDArray[np.float64]
    num_tokens: int
    path_keys: NDArray[np.uint64] | None = None
    log_unlisted: float = -np.inf

    def with_beams(self, beams: NDArray[np.int64], others: JointDistribution) -> JointDistribution:
        """Return this one with the candidates of ``others``, whose beams are these of ours."""
        parents = np.append(self.parents, beams[others.parents])
        order = parents.argsort(kind="stable")
        tokens, weights, masses, raw = (
            np.append(getattr(self, name), getattr(others, name))[order]
            for name in ("tokens", "log_weights", "log_masses", "raw_log_probs")
        )
        unlisted = self.log_unlisted
        return JointDistribution(
            self.nodes, parents[order], tokens, weights, masses, raw, 0, None, unlisted
        )

    def probabilities(self) -> NDArray[np.float64]:
        """Return the normalised probabilities, (num_candidates,) float64."""
        masses = np.exp(self.log_masses - self.log_masses.max())
        normalised: NDArray[np.float64] = masses / masses.sum()
        return normalised

    def candidate_ids(self, chosen: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return a number of each (chosen) candidate, the same in every joint distribution.

        (num_chosen,) int64: the node in the upper half, the token, which may be STAY, added.
        """
        parents, tokens = self.parents, self.tokens
        if chosen is not None:
            parents, tokens = parents[chosen], tokens[chosen]
        numbers: NDArray[np.int64] = (self.nodes[parents] << UPPER_HALF) + tokens
        return numbers

    def aligned_to(self, other: JointDistribution) -> NDArray[np.int64]:
        """Return for every candidate of ``other`` its index in this one, -1 if it has none."""
        ours, theirs = self.candidate_ids(), other.candidate_ids()
        order = np.argsort(ours)
        place = np.minimum(np.searchsorted(ours, theirs, sorter=order), len(ours) - 1)
        match = order[place]
        index: NDArray[np.int64] = np.where(ours[match] == theirs, match, -1)
        return index


def joint_distribution(
    nodes: NDArray[np.int64],
    log_weights: NDArray[np.float64],
    copies: NDArray[np.int64] | None,
    distributions: TokenDistributions,
    rows: NDArray[np.int64],
    *,
    has_ends: bool = True,
) -> JointDistribution:
    """Combine beam weights and next-token distributions, of which row 0 is an absorbing beam's.

    nodes, log_weights, copies, rows: (num_beams,). The row of each beam, how often it was drawn.
    """
    tokens, log_probs, raw = distributions.candidates(rows)
    if isinstance(distributions, ListedDistributions):
        counts = distributions.counts(rows)
        parents = np.repeat(np.arange(len(rows)), counts)
        stays = (rows == 0)[parents]
        tokens[stays], log_probs[stays], raw[stays] = STAY, 0.0, 0.0
        weights = log_probs + log_weights[parents]
        masses = weights if copies is None else weights + np.log(copies)[parents]
        return JointDistribution(nodes, parents, tokens, weights, masses, raw, 0)
    num_beams, num_candidates = len(rows), len(tokens)
    num_tokens = num_candidates // num_beams
    parents_of = _remembered_parents if num_candidates <= _FEW_CANDIDATES else _parents
    parents = parents_of(num_beams, num_tokens)
    if has_ends and not rows.all():
        first = num_tokens * (rows == 0).nonzero()[0]
        tokens[first], log_probs[first], raw[first] = STAY, 0.0, 0.0
        is_left = (rows != 0)[parents]
        is_left[first] = True
        tokens, log_probs, raw = tokens[is_left], log_probs[is_left], raw[is_left]
        parents, num_tokens = parents[is_left], 0
    if num_tokens <= FEW_TOKENS:
        weights = log_probs + log_weights[parents]
    else:
        weights = (log_probs.reshape(-1, num_tokens) + log_weights[:, None]).ravel()
    masses = weights if copies is None else weights + np.log(copies)[parents]
    return JointDistribution(nodes, parents, tokens, weights, masses, raw, num_tokens)


FEW_TOKENS = 256
"""Of a beam: up to here a gather and an operation on it take less time than one that broadcasts."""
_FEW_CANDIDATES = 4096


def _parents(num_beams: int, num_tokens: int) -> NDArray[np.int64]:
    """Return the beam of every candidate: (2, 3) gives [0, 0, 0, 1, 1, 1]."""
    parents = np.repeat(np.arange(num_beams), num_tokens)
    parents.flags.writeable = False
    return parents


_remembered_parents = lru_cache(maxsize=64)(_parents)  # the same few recur in every layer

_SORTED_WHOLE = 256  # up to here sorting all candidates is faster than finding the best first


def best_candidates(scores: NDArray[np.float64], num_wanted: int) -> NDArray[np.int64]:
    """Return the best candidates of finite score, (<= num_wanted,) int64, equal ones by index."""
    num_candidates = len(scores)
    if num_candidates <= _SORTED_WHOLE or not 0 < num_wanted < num_candidates:
        best = (-scores).argsort(kind="stable")[:num_wanted]
    else:
        last = num_candidates - num_wanted
        best = (scores >= np.partition(scores, last)[last]).nonzero()[0]  # more if some tie
        best = best[(-scores[best]).argsort(kind="stable")[:num_wanted]]
    if len(best) and scores[best[-1]] == -np.inf:
        best = best[scores[best] > -np.inf]
    return best
