"""Beams, their hypotheses, and the joint law over (beam, token) candidates (ALGORITHM.md 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.warp import TokenLaw

STAY = -1
"""The "token" by which an absorbing beam continues: it stays what it is, with probability 1."""


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """The new tokens of a beam as a chain to its parent; beams share their common part.

    Attributes:
        parent: the hypothesis without its last token, None for the empty one.
        token: last token.
        token_logprob: its raw (unwarped) log-probability under the target.
        logprob: sum of ``token_logprob`` from the first token on.
        num_tokens: length of the chain.
    """

    parent: Hypothesis | None = None
    token: int = -1
    token_logprob: float = 0.0
    logprob: float = 0.0
    num_tokens: int = 0

    def extended(self, token: int, token_logprob: float) -> Hypothesis:
        """Return this hypothesis with one more token."""
        return Hypothesis(
            self, token, token_logprob, self.logprob + token_logprob, self.num_tokens + 1
        )

    def chain(self) -> list[Hypothesis]:
        """Return the non-empty hypotheses from the first token to this one."""
        links, link = [], self
        while link.parent is not None:
            links.append(link)
            link = link.parent
        return links[::-1]

    def score(self, length_penalty: float) -> float:
        """Return logprob / num_tokens ** length_penalty, by which sequences are ranked."""
        return self.logprob / math.pow(max(self.num_tokens, 1), length_penalty)


@dataclass(frozen=True)
class Beams:
    """The beam set between two layers.

    Attributes:
        nodes: (num_beams,) node of the forest of every beam.
        log_weights: (num_beams,) float64. Log-probability under the warped target laws.
        hypotheses: (num_beams,) the new tokens of every beam.
    """

    nodes: list[int]
    log_weights: NDArray[np.float64]
    hypotheses: list[Hypothesis]


@dataclass(frozen=True)
class JointLaw:
    """The joint law w_i * p~(v | x_i) over candidates (beam i, token v), unnormalised, in logs.

    Attributes:
        parents: (num_candidates,) int64. Index of the candidate's beam.
        tokens: (num_candidates,) int64. STAY for an absorbing beam.
        log_probs: (num_candidates,) float64. log w_i + log p~(v | x_i): the child's weight.
        raw_log_probs: (num_candidates,) float64. Unwarped log-probability of the token alone.
    """

    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    raw_log_probs: NDArray[np.float64]

    def subset(self, candidates: NDArray[np.int64]) -> JointLaw:
        """Return the law's entries at ``candidates``, in that order, not renormalised."""
        return JointLaw(
            self.parents[candidates],
            self.tokens[candidates],
            self.log_probs[candidates],
            self.raw_log_probs[candidates],
        )

    def probabilities(self) -> NDArray[np.float64]:
        """Return the normalised law, (num_candidates,) float64."""
        weights = np.exp(self.log_probs - self.log_probs.max())
        normalised: NDArray[np.float64] = weights / weights.sum()
        return normalised


_STAY_LAW = TokenLaw(np.array([STAY]), np.zeros(1), np.zeros(1))


def joint_law(log_weights: NDArray[np.float64], laws: Sequence[TokenLaw | None]) -> JointLaw:
    """Combine beam weights and token laws; None stands for an absorbing beam."""
    full = [law or _STAY_LAW for law in laws]
    parents = np.repeat(np.arange(len(full)), [len(law.tokens) for law in full])
    return JointLaw(
        parents,
        np.concatenate([law.tokens for law in full]),
        np.concatenate([law.log_probs for law in full]) + log_weights[parents],
        np.concatenate([law.raw_log_probs for law in full]),
    )


def common_tokens(hypotheses: Sequence[Hypothesis]) -> list[int]:
    """Return the longest run of first tokens that all hypotheses share."""
    chains = [[link.token for link in hypothesis.chain()] for hypothesis in hypotheses]
    shared: list[int] = []
    for tokens in zip(*chains, strict=False):
        if len(set(tokens)) > 1:
            break
        shared.append(tokens[0])
    return shared
