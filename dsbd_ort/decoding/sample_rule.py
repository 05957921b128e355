"""Rule "sample": every layer is a draw from the target's joint law (ALGORITHM.md 3.1, 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.drafting import Scores
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_law import JointLaw
from dsbd_ort.decoding.rule import BeamSetRule, TargetLaws, descended, target_law
from dsbd_ort.decoding.warp import Warp
from dsbd_ort.decoding.width import layer_width


class Coupling(Protocol):
    """How the draws of draft and target hang together."""

    @property
    def keeps_descendants(self) -> bool:
        """Whether computed descendants of the beams may be kept for the next iteration."""

    @property
    def reads_draft_laws(self) -> bool:
        """Whether a layer is selected by the draft's joint law as well."""

    @property
    def draft_scores(self) -> Scores | None:
        """See SelectionRule.draft_scores."""

    def propose(self, law: JointLaw, num_draws: int, step: int) -> NDArray[np.int64]:
        """Draw the draft's candidates of one layer, in order."""

    def choose(
        self, law: JointLaw, layer: DraftLayer | None, num_draws: int, step: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Return the target's candidates of one layer and whether the next may be selected."""


class SampleRule(BeamSetRule):
    """Beam sampling: draws with or without replacement; all beams absorbing is the end."""

    def __init__(self, config: DecodingConfig, forest: Forest, coupling: Coupling) -> None:
        super().__init__(config, forest)
        self.warp = Warp(config.temperature, config.top_k, config.top_p)
        self.keeps_descendants = coupling.keeps_descendants
        self.propose = coupling.propose
        self.draft_scores = coupling.draft_scores
        self.reads_draft_laws = coupling.reads_draft_laws or config.width_policy == "threshold"
        self._coupling = coupling

    def select(
        self, target: TargetLaws, beams: Beams, layers: list[DraftLayer], step: int
    ) -> Iterator[Beams]:
        """See SelectionRule.select."""
        may_go_on, depth = True, 0
        while may_go_on and all(map(target.is_computed, beams.nodes)):
            law = target_law(target, beams)
            layer = layers[depth] if depth < len(layers) else None
            width = layer_width(self._config, law, layer)
            drawn, may_go_on = self._coupling.choose(law, layer, width, step + depth)
            beams = descended(self._forest, beams, law, drawn)
            depth += 1
            yield beams
