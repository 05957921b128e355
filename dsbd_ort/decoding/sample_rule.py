"""Rule "sample": layers drawn from the target's distribution (docs/algorithm.md 3.1, 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import DraftLayer
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.noise import noisy
from dsbd_ort.decoding.rejection_coupling import RejectionCoupling
from dsbd_ort.decoding.rule import Finished, LayerBuilder, SelectionRule, is_decided
from dsbd_ort.decoding.width import layer_width


class GumbelCoupling:
    """Coupling "gumbel" (docs/algorithm.md 3.1): draft and target see the same noise.

    By the Gumbel-top-k theorem (Kool et al. 2019, section 2.3) the n candidates of largest
    log P + G, in that order, are n sequential draws without replacement from P. G belongs to (seed,
    path, token, depth), not to a model, so the draft's candidates are the target's wherever the two
    distributions are close (Daliri et al. 2024), and the output depends on the target alone.

    Computed descendants of the beams stay in the forest: what is drafted never changes the output.
    """

    keeps_descendants = True
    reads_draft_distributions = False

    def __init__(self, forest: Forest, replacement: bool) -> None:
        self._forest = forest
        self._replacement = replacement

    def choose(
        self, joint: JointDistribution, layer: DraftLayer | None, num_draws: int, depth: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Draw the target's candidates, whatever was drafted; always willing to go on."""
        return self.propose(joint, num_draws, depth), True

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Return the drawn candidates in order, (<= num_draws,) int64.

        Fewer than ``num_draws`` come back if fewer have positive probability. With replacement,
        draw j has a noise of its own and takes the single best.
        """
        if self._replacement:
            keys = self._forest.candidate_keys(joint)
            scores = [noisy(joint.log_masses, keys, depth, j) for j in range(num_draws)]
            return np.array([score.argmax() for score in scores])
        keys = self._forest.candidate_keys(joint)
        return best_candidates(noisy(joint.log_masses, keys, depth), num_draws)

    def scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """Return log P + G of every candidate, (num_candidates,) float64."""
        return noisy(joint.log_masses, self._forest.candidate_keys(joint), depth)


Coupling = GumbelCoupling | RejectionCoupling
"""How the draws of draft and target are correlated."""


class SampleRule(SelectionRule):
    """Beam sampling: draws with or without replacement until all beams are absorbing.

    Or until ``early_stopping`` ends it, a function of the beams alone: so what is returned is the
    same with and without speculation, and every layer has the same distribution as without it.
    """

    def __init__(
        self,
        config: DecodingConfig,
        builder: LayerBuilder,
        coupling: GumbelCoupling | RejectionCoupling,
    ) -> None:
        super().__init__(config, builder)
        self.keeps_descendants = coupling.keeps_descendants
        self.reads_draft_distributions = (
            coupling.reads_draft_distributions or config.width_policy == "threshold"
        )
        self._coupling = coupling
        self.propose = coupling.propose

    def draft_scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """See SelectionRule.draft_scores."""
        assert isinstance(self._coupling, GumbelCoupling)  # the throughput policy requires it
        return self._coupling.scores(joint, depth)

    def select(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        """See SelectionRule.select."""
        layers = iter(drafted)
        may_go_on = True
        while may_go_on and target.are_computed(beams.nodes):
            joint = target.joint(beams.nodes, beams.log_weights, beams.copies)
            layer = next(layers, None)
            width = self._config.num_beams
            if layer is not None and self._config.width_policy != "fixed":
                width = layer_width(self._config, joint, layer)
            drawn, may_go_on = self._coupling.choose(joint, layer, width, depth)
            beams = self._builder.descended(beams, joint, drawn)
            depth += 1
            yield beams

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """See SelectionRule.is_finished."""
        if not self._builder.forest.has_ends:
            return num_layers == self._config.max_new_tokens
        if super().is_finished(beams, num_layers):
            return True
        # Memory "single" goes on with one beam of an iteration, whether that has ended or not.
        if self._config.memory == "single":
            return False
        num_wanted = self._config.num_return_sequences
        best = self.results(beams).scores[:num_wanted]
        if len(best) < num_wanted:
            return False
        live = beams.hypotheses[self._builder.forest.is_absorbing[beams.nodes] == 0]
        best_logprob = float(self._builder.hypotheses.logprobs[live].max())
        return is_decided(self._config, float(best[-1]), best_logprob, num_layers)

    def results(self, beams: Beams) -> Finished:
        """Return the hypotheses that are complete, copies repeated, by score."""
        lengths = self._builder.hypotheses.lengths[beams.hypotheses]
        is_complete = lengths == self._config.max_new_tokens
        is_complete |= self._builder.forest.is_absorbing[beams.nodes] == 1
        return self._ranked(beams, beams.repeated[is_complete[beams.repeated]])
