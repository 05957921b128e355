"""What differs between decoders: how the draft proposes, how layers are selected, what is returned.

A rule sees laws and beams, never an engine; the loop that calls it is ``decode``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams, Hypothesis
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.draft import DraftLayer, distinct_in_order
from dsbd_ort.decoding.drafting import Scores
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_law import JointLaw, joint_law
from dsbd_ort.decoding.warp import AnyLaw, Warp


class TargetLaws(Protocol):
    """What the target has computed of the forest."""

    def is_computed(self, node: int) -> bool:
        """Tell whether the law after ``node`` is known; of an absorbing node it always is."""

    def law(self, node: int) -> AnyLaw | None:
        """Return the law after a computed node, None for an absorbing one."""


@dataclass(frozen=True)
class Finished:
    """A hypothesis to return, and its rank."""

    hypothesis: Hypothesis
    score: float


class SelectionRule(Protocol):
    """One rule of ALGORITHM.md section 3, with the state of one request.

    Attributes:
        warp: how logits of both models become token laws.
        keeps_descendants: whether computed descendants of the beams may be kept.
        reads_draft_laws: whether it reads the draft's joint laws, not only what was drawn.
        draft_scores: by these the draft's candidates are ranked; None where more than a ranking
            decides what may be drafted.
    """

    warp: Warp
    keeps_descendants: bool
    reads_draft_laws: bool

    @property
    def draft_scores(self) -> Scores | None:
        """See the class."""

    def propose(self, law: JointLaw, num_draws: int, step: int) -> NDArray[np.int64]:
        """Return the draft's candidates of layer ``step``, in order, (<= num_draws,) int64."""

    def select(
        self, target: TargetLaws, beams: Beams, layers: list[DraftLayer], step: int
    ) -> Iterator[Beams]:
        """Yield the beams of layer ``step``, ``step`` + 1, ... as far as the target's laws reach.

        At least one layer; the laws of ``beams`` are known. ``layers`` are the drafted ones.
        """

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """Tell whether nothing is left to select after ``num_layers`` layers."""

    def live(self, beams: Beams) -> list[Hypothesis]:
        """Return the hypotheses one of which will begin the best sequence."""

    def results(self, beams: Beams) -> list[Finished]:
        """Return the final hypotheses, best first."""


def target_law(target: TargetLaws, beams: Beams) -> JointLaw:
    """Return the target's joint law over the continuations of computed beams."""
    laws = [target.law(node) for node in beams.nodes]
    return joint_law(beams.nodes, beams.log_weights, beams.copies, laws)


def descended(forest: Forest, beams: Beams, law: JointLaw, drawn: NDArray[np.int64]) -> Beams:
    """Return the beams that the drawn candidates of ``law`` make of ``beams``."""
    chosen, copies = distinct_in_order(drawn)
    hypotheses = extended(beams, law, chosen)
    return Beams(forest.descend(law, chosen), law.log_weights[chosen], hypotheses, copies)


def extended(beams: Beams, law: JointLaw, chosen: NDArray[np.int64]) -> list[Hypothesis]:
    """Return the hypotheses of the chosen candidates; an absorbing beam's stays what it is."""
    taken = zip(
        law.parents[chosen].tolist(),
        law.tokens[chosen].tolist(),
        law.raw_log_probs(chosen),
        strict=True,
    )
    return [
        beams.hypotheses[parent] if token < 0 else beams.hypotheses[parent].extended(token, logprob)
        for parent, token, logprob in taken
    ]


class BeamSetRule:
    """What rules share whose beams are their results: ended beams stay in the set."""

    def __init__(self, config: DecodingConfig, forest: Forest) -> None:
        self._config = config
        self._forest = forest

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """Tell whether all beams have ended or are as long as they may be."""
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
