"""Grow the forest by the draft model, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams, JointLaw, joint_law
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_cache import ForestCache

Draw = Callable[[Forest, list[int], JointLaw, int, int], NDArray[np.int64]]
"""How candidates are drawn: (forest, nodes, law, num_draws, step) -> candidates in order."""


@dataclass(frozen=True)
class DraftLayer:
    """One drafted layer.

    Attributes:
        nodes: (num_draft_beams,) the nodes whose continuations the layer drafts.
        law: Q_t, the draft's joint law over those nodes.
        num_drawn: candidates drawn, W_S at most.
    """

    nodes: list[int]
    law: JointLaw
    num_drawn: int


def draft_forest(
    forest: Forest,
    draft: ForestCache,
    beams: Beams,
    layer_widths: tuple[int, ...],
    draw: Draw,
    step: int,
) -> list[DraftLayer]:
    """Add the draft's candidates to the forest: one engine call a layer.

    The draft's weights u start at the target's weights of the input beams (the published code
    starts from equal weights and loses acceptance), then u_child = u_parent * q~.

    Args:
        forest: grows.
        draft: the draft's side of the forest.
        beams: the input beams.
        layer_widths: W_S of every layer.
        draw: how to draw from the draft's law.
        step: number of the first layer, counted from the prompt.

    Returns:
        The layers; fewer than asked when all draft beams have ended.
    """
    layers: list[DraftLayer] = []
    nodes, log_u = beams.nodes, beams.log_weights
    for t, width in enumerate(layer_widths):
        if all(forest.is_absorbing[node] for node in nodes):
            break
        draft.compute(nodes)
        law = joint_law(log_u, [draft.law(node) for node in nodes])
        drawn = draw(forest, nodes, law, width, step + t)
        layers.append(DraftLayer(nodes, law, len(drawn)))
        nodes, log_u = forest.descend(nodes, law, drawn), law.log_probs[drawn]
    return layers
