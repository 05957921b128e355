"""Rule "joint": multi-token joint decoding, MJSD and its reference MJGD (docs/algorithm.md 3.4).

Approximate by design: MJSD trades the target's distribution for a better joint likelihood of the
accepted tokens (Qin et al. 2024, arXiv 2407.09722). Temperature 0 takes the best next token where
otherwise one is drawn; the joint likelihoods are then those of temperature 1.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import DraftLayer
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.rule import LayerBuilder, SelectionRule
from dsbd_ort.decoding.sample_rule import GumbelCoupling


class _JointDecoding(SelectionRule):
    """Base of the rules MJSD and MJGD: beam decoding by joint likelihood."""

    reads_draft_distributions = True

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Return the candidates of largest joint likelihood: beam decoding by the draft."""
        return best_candidates(self.draft_scores(joint, depth), num_draws)

    def draft_scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """See SelectionRule.draft_scores."""
        return joint.log_masses

    def _next_beams(self, target: ForestRunner, beams: Beams, width: int) -> Beams:
        """Return the ``width`` continuations of largest joint target likelihood."""
        joint = target.joint(beams.nodes, beams.log_weights, None)
        return self._builder.descended(beams, joint, best_candidates(joint.log_masses, width))


class JointSpeculativeRule(_JointDecoding):
    """MJSD: accept the deepest drafted beam whose joint likelihood under the target holds up.

    At each depth a beam passes when its joint target probability over the largest joint draft
    probability of that depth exceeds ``joint_threshold``; a failing shallower depth does not stop
    a deeper one. Of the deepest passing depth the beam of highest joint target probability is
    taken, then one more token from the target. With one draft beam this is MJSD's rule for a
    single sequence, r_i > joint_threshold.
    """

    def __init__(self, config: DecodingConfig, builder: LayerBuilder) -> None:
        super().__init__(config, builder)
        self._gumbel = GumbelCoupling(builder.forest, replacement=False)

    def select(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        forest = self._builder.forest
        for node in self._accepted_path(target, beams, drafted):
            joint = target.joint(beams.nodes, beams.log_weights, None)
            tokens = joint.tokens == forest.tokens[node]
            beams = self._builder.descended(beams, joint, np.flatnonzero(tokens))
            depth += 1
            yield beams
        if forest.are_absorbing(beams.nodes):
            return
        if self._config.temperature == 0.0:
            yield self._next_beams(target, beams, 1)
        else:
            joint = target.joint(beams.nodes, beams.log_weights, None)
            yield self._builder.descended(beams, joint, self._gumbel.propose(joint, 1, depth))

    def _accepted_path(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer]
    ) -> list[int]:
        """Return the nodes from below the input beam to the accepted one; none if none passes."""
        forest, root = self._builder.forest, int(beams.nodes[0])
        log_p = np.full(len(forest), -np.inf)  # of the path from the root, if it is known
        log_p[root] = 0.0
        accepted = root
        for layer in drafted:
            children = layer.children
            parents = forest.parents[children]  # of one that has ended as well: the same again
            log_p[children] = log_p[parents] + target.log_probs(parents, forest.tokens[children])
            best = int(children[log_p[children].argmax()])
            largest_log_q = layer.distribution.log_weights[layer.drawn].max() - beams.log_weights[0]
            if log_p[best] - largest_log_q > math.log(self._config.joint_threshold):
                accepted = best
        path = []
        while accepted != root:
            path.append(accepted)
            accepted = int(forest.parents[accepted])
        return path[::-1]


class JointGreedyRule(_JointDecoding):
    """MJGD: the ``joint_tokens`` tokens of highest joint target likelihood, then the next ones.

    A beam of width ``joint_beams`` finds them; exact when that covers the tree.
    """

    def select(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        while target.are_computed(beams.nodes):
            beams = self._next_beams(target, beams, self._config.joint_beams)
            depth += 1
            if depth % self._config.joint_tokens == 0 or self.is_finished(beams, depth):
                beams = beams.only(int(np.argmax(beams.log_weights)))
            yield beams
