"""Beams and their hypotheses: what a request has committed to so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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


EMPTY = Hypothesis()
"""The hypothesis without a token, with which every request starts."""


@dataclass(frozen=True)
class Beams:
    """The beam set between two layers. Draws with replacement make it a multiset.

    Attributes:
        nodes: (num_distinct,) node of the forest of every distinct beam.
        log_weights: (num_distinct,) float64. Log-probability under the warped target distributions.
        hypotheses: (num_distinct,) the new tokens of every beam.
        copies: (num_distinct,) how often the beam was drawn; all 1 without replacement.
    """

    nodes: list[int]
    log_weights: NDArray[np.float64]
    hypotheses: list[Hypothesis]
    copies: list[int]

    @classmethod
    def single(cls, node: int, hypothesis: Hypothesis, log_weight: float = 0.0) -> Beams:
        """Return the set of one beam."""
        return cls([node], np.array([log_weight]), [hypothesis], [1])

    @classmethod
    def initial(cls) -> Beams:
        """Return the beams of a new request: one, at the last token of the prompt, node 0."""
        return cls.single(0, EMPTY)

    @property
    def width(self) -> int:
        """Number of beams, copies counted."""
        return sum(self.copies)

    def only(self, index: int) -> Beams:
        """Return the set of beam ``index`` alone, with weight 1."""
        return Beams.single(self.nodes[index], self.hypotheses[index])


def common_tokens(hypotheses: Iterable[Hypothesis]) -> list[int]:
    """Return the longest run of first tokens that all hypotheses share."""
    chains: Sequence[list[int]] = [[link.token for link in h.chain()] for h in hypotheses]
    shared: list[int] = []
    for tokens in zip(*chains, strict=False):
        if len(set(tokens)) > 1:
            break
        shared.append(tokens[0])
    return shared
