"""Selection rules: how a strategy proposes candidates, selects layers and ranks its results.

A rule sees distributions and beams, never an engine; the loop that calls it is in ``decode``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams, Hypotheses
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import DraftLayer, Propose, Scores, distinct_in_order
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.joint_distribution import JointDistribution

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Finished:
    """Hypotheses to return, entries of ``Hypotheses``, and their scores, (n,) each; best first."""

    hypotheses: Ints
    scores: NDArray[np.float64]

    def first(self, number: int) -> Finished:
        return Finished(self.hypotheses[:number], self.scores[:number])

    def ranked(self) -> Finished:
        """Return them by score; of equal scores the first comes first."""
        order = (-self.scores).argsort(kind="stable")
        return Finished(self.hypotheses[order], self.scores[order])


class LayerBuilder:
    """Builds layers: the nodes in the forest of a request, and their hypotheses."""

    def __init__(self, forest: Forest, hypotheses: Hypotheses, *, repeats: bool) -> None:
        """Take both; ``repeats``: whether a candidate may be drawn more than once."""
        self.forest = forest
        self.hypotheses = hypotheses
        self._repeats = repeats

    def descended(self, beams: Beams, joint: JointDistribution, drawn: Ints) -> Beams:
        """Return the beams that the drawn candidates of ``joint`` make of ``beams``."""
        chosen, copies = distinct_in_order(drawn) if self._repeats else (drawn, None)
        nodes = self.forest.descend(joint, chosen)
        return Beams(nodes, joint.log_weights[chosen], self.extended(beams, joint, chosen), copies)

    def extended(self, beams: Beams, joint: JointDistribution, chosen: Ints) -> Ints:
        """Return the hypotheses of the chosen candidates, that of an absorbing beam as it is."""
        parents, tokens = beams.hypotheses[joint.parents[chosen]], joint.tokens[chosen]
        token_logprobs = joint.raw_log_probs[chosen]
        if not self.forest.has_ends:
            return self.hypotheses.extend(parents, tokens, token_logprobs)
        entries, grows = parents.copy(), tokens >= 0
        entries[grows] = self.hypotheses.extend(
            parents[grows], tokens[grows], token_logprobs[grows]
        )
        return entries


def is_decided(
    config: DecodingConfig, last_score: float, best_logprob: float, num_layers: int
) -> bool:
    """Return whether ``early_stopping`` ends a request (docs/algorithm.md 3.13).

    As transformers does: True ends it at once; else no live beam may score more than the last of
    the finished ones that count. A beam's log-probability only falls; False scores it as if it
    ended now, "never" at its best length, the longest if ``length_penalty`` is above 0.

    last_score: of the finished sequences that count. best_logprob: of the live beams, by which they
    would be scored.
    """
    if config.early_stopping is True:
        return True
    is_hopeful = config.early_stopping == "never" and config.length_penalty > 0.0
    length = config.max_new_tokens if is_hopeful else num_layers
    return bool(best_logprob / length**config.length_penalty <= last_score)


class SelectionRule(ABC):
    """One rule of docs/algorithm.md 3, with the state of one request.

    Here the final beams are the results, and ended beams stay in the set; a search differs.

    keeps_descendants: whether computed descendants of the beams may be kept.
    reads_draft_distributions: whether it reads the draft's joint distributions, not only what was
        drawn from them.
    propose: returns the draft's candidates of a layer.
    draft_scores: returns the scores by which ``propose`` ranks candidates, (num_candidates,)
        float64; None of a rule whose output depends on the draft.
    """

    keeps_descendants = True
    reads_draft_distributions = False
    propose: Propose
    draft_scores: Scores | None

    def __init__(self, config: DecodingConfig, builder: LayerBuilder) -> None:
        self._config = config
        self._builder = builder

    @abstractmethod
    def select(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        """Yield the beams of layer ``depth``, ``depth`` + 1, ... as far as the target has computed.

        At least one layer; the distributions after ``beams`` are known.
        """

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """Return whether nothing is left to select after ``num_layers`` layers."""
        forest = self._builder.forest
        return num_layers == self._config.max_new_tokens or forest.are_absorbing(beams.nodes)

    def live(self, beams: Beams) -> Ints:
        """Return the hypotheses one of which will begin the best sequence."""
        return beams.hypotheses

    def ended(self) -> Finished:
        """Return the hypotheses that have ended and that no beam stands for any more."""
        return Finished(np.arange(0), np.zeros(0))

    def results(self, beams: Beams) -> Finished:
        """Return the final hypotheses, best first; before the end those that have ended."""
        return self._ranked(beams, beams.repeated)

    def _ranked(self, beams: Beams, chosen: Ints) -> Finished:
        hypotheses = beams.hypotheses[chosen]
        scores = self._builder.hypotheses.scores(hypotheses, self._config.length_penalty)
        return Finished(hypotheses, scores).ranked()
