"""Selection rules: how a strategy proposes candidates, selects layers and ranks its results.

A rule sees distributions and beams, never an engine; the loop that calls it is in ``decode``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams, Hypothesis
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import TokenDistribution, Warp
from dsbd_ort.decoding.draft import DraftLayer, distinct_in_order
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_distribution import JointDistribution, joint_distribution


class NodeDistributions(Protocol):
    """The distributions that the target has computed of the forest."""

    def is_computed(self, node: int) -> bool:
        """Return whether the distribution after ``node`` is known; absorbing nodes need none."""

    def distribution(self, node: int) -> TokenDistribution | None:
        """Return the distribution after a computed node, None for an absorbing one."""


@dataclass(frozen=True)
class Finished:
    """A hypothesis to return, and its rank."""

    hypothesis: Hypothesis
    score: float


class SelectionRule(Protocol):
    """One rule of docs/algorithm.md 3, with the state of one request.

    Attributes:
        warp: how logits of both models become distributions.
        keeps_descendants: whether computed descendants of the beams may be kept.
        reads_draft_distributions: whether it reads the draft's joint distributions, not only what
            was drawn from them.
    """

    warp: Warp
    keeps_descendants: bool
    reads_draft_distributions: bool

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Return the draft's candidates of layer ``depth``, in order, (<= num_draws,) int64."""

    def draft_scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """Return the scores by which ``propose`` ranks candidates, (num_candidates,) float64.

        Only of rules whose output does not depend on the draft.
        """

    def select(
        self, target: NodeDistributions, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        """Yield the beams of layer ``depth``, ``depth`` + 1, ... as far as the target has computed.

        At least one layer; the distributions after ``beams`` are known.
        """

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """Return whether nothing is left to select after ``num_layers`` layers."""

    def live(self, beams: Beams) -> list[Hypothesis]:
        """Return the hypotheses one of which will begin the best sequence."""

    def results(self, beams: Beams) -> list[Finished]:
        """Return the final hypotheses, best first."""


def target_distribution(target: NodeDistributions, beams: Beams) -> JointDistribution:
    """Return the target's joint distribution over the continuations of computed beams."""
    found = [target.distribution(node) for node in beams.nodes]
    return joint_distribution(beams.nodes, beams.log_weights, beams.copies, found)


def descended(
    forest: Forest, beams: Beams, joint: JointDistribution, drawn: NDArray[np.int64]
) -> Beams:
    """Return the beams that the drawn candidates of ``joint`` make of ``beams``."""
    chosen, copies = distinct_in_order(drawn)
    hypotheses = extended(beams, joint, chosen)
    return Beams(forest.descend(joint, chosen), joint.log_weights[chosen], hypotheses, copies)


def extended(beams: Beams, joint: JointDistribution, chosen: NDArray[np.int64]) -> list[Hypothesis]:
    """Return the hypotheses of the chosen candidates; that of an absorbing beam is unchanged."""
    taken = zip(
        joint.parents[chosen].tolist(),
        joint.tokens[chosen].tolist(),
        joint.raw_log_probs(chosen),
        strict=True,
    )
    return [
        beams.hypotheses[parent] if token < 0 else beams.hypotheses[parent].extended(token, logprob)
        for parent, token, logprob in taken
    ]


class BeamSetRule:
    """Base of the rules whose final beams are the results: ended beams stay in the set."""

    def __init__(self, config: DecodingConfig, forest: Forest) -> None:
        self._config = config
        self._forest = forest

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """Return whether all beams have ended or reached ``max_new_tokens``."""
        if num_layers == self._config.max_new_tokens:
            return True
        return self._forest.absorbing.issuperset(beams.nodes)

    def live(self, beams: Beams) -> list[Hypothesis]:
        """See SelectionRule.live."""
        return beams.hypotheses

    def results(self, beams: Beams) -> list[Finished]:
        """Return the beams' hypotheses, copies repeated, by score."""
        penalty = self._config.length_penalty
        finished = [
            Finished(hypothesis, hypothesis.score(penalty))
            for hypothesis, copies in zip(beams.hypotheses, beams.copies, strict=True)
            for _ in range(copies)
        ]
        return sorted(finished, key=lambda f: -f.score)
