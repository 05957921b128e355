"""Rule "sample": layers drawn from the target's distribution (docs/algorithm.md 3.1, 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import Warp
from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.gumbel_coupling import GumbelCoupling
from dsbd_ort.decoding.joint_distribution import JointDistribution
from dsbd_ort.decoding.rule import BeamSetRule, Growth, NodeDistributions
from dsbd_ort.decoding.width import layer_width


class Coupling(Protocol):
    """How the draws of draft and target are correlated.

    Attributes:
        keeps_descendants: whether computed descendants of the beams may be kept for the next
            iteration.
        reads_draft_distributions: whether a layer is selected by the draft's joint distribution
            as well.
    """

    keeps_descendants: bool
    reads_draft_distributions: bool

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Draw the draft's candidates of one layer, in order."""

    def choose(
        self, joint: JointDistribution, layer: DraftLayer | None, num_draws: int, depth: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Return the target's candidates of one layer and whether the next may be selected."""


class SampleRule(BeamSetRule):
    """Beam sampling: draws with or without replacement until all beams are absorbing."""

    def __init__(self, config: DecodingConfig, growth: Growth, coupling: Coupling) -> None:
        super().__init__(config, growth)
        self.warp = Warp(config.temperature, config.top_k, config.top_p)
        self.keeps_descendants = coupling.keeps_descendants
        self.reads_draft_distributions = (
            coupling.reads_draft_distributions or config.width_policy == "threshold"
        )
        self._coupling = coupling

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """See SelectionRule.propose."""
        return self._coupling.propose(joint, num_draws, depth)

    def draft_scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """See SelectionRule.draft_scores."""
        assert isinstance(self._coupling, GumbelCoupling)  # the throughput policy requires it
        return self._coupling.scores(joint, depth)

    def select(
        self, target: NodeDistributions, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        """See SelectionRule.select."""
        layers = iter(drafted)
        may_go_on = True
        while may_go_on and target.are_computed(beams.nodes):
            joint = target.joint(beams.nodes, beams.log_weights, beams.copies)
            layer = next(layers, None)
            width = layer_width(self._config, joint, layer)
            drawn, may_go_on = self._coupling.choose(joint, layer, width, depth)
            beams = self._growth.descended(beams, joint, drawn)
            depth += 1
            yield beams
