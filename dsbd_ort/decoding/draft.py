"""Grow the forest by the draft model, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.drafting import Drafting
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_cache import ForestCache
from dsbd_ort.decoding.joint_law import JointLaw, joint_law
from dsbd_ort.decoding.step_model import EngineCalls


@dataclass(frozen=True)
class DraftLayer:
    """One drafted layer.

    Attributes:
        drawn: (<= W_S,) int64 candidates of ``law`` in the order drawn.
        children: the nodes of the distinct drawn candidates, in the order first drawn.
        kept_law: ``law``, None where the rule never reads it: without top-k it is an array of
            the vocabulary's size for every beam.
    """

    drawn: NDArray[np.int64]
    children: list[int]
    kept_law: JointLaw | None

    @property
    def law(self) -> JointLaw:
        """Q_t, the draft's joint law, for a rule that ``reads_draft_laws``."""
        assert self.kept_law is not None
        return self.kept_law


def draft_forest(
    forest: Forest,
    draft: ForestCache,
    beams: Beams,
    drafting: Drafting,
    step: int,
    *,
    keeps_laws: bool,
) -> EngineCalls[list[DraftLayer]]:
    """Add the draft's candidates to the forest: one engine call a layer.

    The draft's weights u start at the target's weights of the input beams (the published code
    starts from equal weights and loses acceptance), then u_child = u_parent * q~.

    Args:
        forest: grows.
        draft: the draft's side of the forest.
        beams: the input beams.
        drafting: the policy, which has begun its iteration.
        step: number of the first layer, counted from the prompt.
        keeps_laws: whether the layers hold the draft's joint laws.

    Returns:
        The layers; none are added once all draft beams have ended.
    """
    layers: list[DraftLayer] = []
    nodes, log_u, copies = beams.nodes, beams.log_weights, beams.copies
    while not forest.absorbing.issuperset(nodes) and drafting.wants_layer(len(nodes)):
        yield from draft.compute(nodes)
        law = joint_law(nodes, log_u, copies, [draft.law(node) for node in nodes])
        drawn = drafting.choose(law, step + len(layers))
        if not len(drawn):
            break
        distinct, copies = distinct_in_order(drawn)
        nodes, log_u = forest.propose(law, distinct), law.log_weights[distinct]
        layers.append(DraftLayer(drawn, nodes, law if keeps_laws else None))
    return layers


def distinct_in_order(
    drawn: NDArray[np.int64],
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the distinct candidates in the order first drawn, and how often each was drawn."""
    if len(set(drawn.tolist())) == len(drawn):  # always so without replacement
        return drawn, [1] * len(drawn)
    values, first, counts = np.unique(drawn, return_index=True, return_counts=True)
    order = np.argsort(first)
    return values[order], counts[order].tolist()
