"""Width policies: how many beams a layer keeps (ALGORITHM.md 3.5; DSBD paper, dynamic width)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import JointLaw
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.draft import DraftLayer

Floats = NDArray[np.float64]


def layer_width(
    config: DecodingConfig, nodes: list[int], law: JointLaw, layer: DraftLayer | None
) -> int:
    """Return n_t, the width of a layer whose target law is ``law`` over the beams ``nodes``.

    It looks at the laws of draft and target alone, never at what was drawn in this layer:
    otherwise width and content would be correlated and the output law wrong. A layer behind the
    drafted ones (``layer`` None) always gets the full width.
    """
    if config.width_policy == "fixed" or layer is None:
        return config.width
    p = law.probabilities()
    q = aligned(layer, nodes, law)
    return threshold_width(
        acceptance_counts(p, q, layer.num_drawn),
        config.width,
        config.smallest_width,
        config.accept_threshold,
    )


def threshold_width(counts: Floats, most: int, least: int, threshold: float) -> int:
    """Return the largest n in [least, most] with Pr[at least n accepted] >= threshold.

    counts: (num_drafts + 1,) probability that exactly n drafts are accepted. If no n reaches the
    threshold: ``least``.
    """
    at_least = counts[::-1].cumsum()[::-1]
    for n in range(min(most, len(counts) - 1), least, -1):
        if at_least[n] >= threshold:
            return n
    return least


def acceptance_counts(p: Floats, q: Floats, num_drafts: int) -> Floats:
    """Return Pr[exactly n of ``num_drafts`` drafts are accepted], (num_drafts + 1,) float64.

    p, q: target and draft law on the target's candidates, (num_candidates,) float64; q may sum
    to less than 1. ``alpha[k]``: the k-th draft since the last acceptance is accepted; ``beta[k]``:
    it is the first to be. (The published code subtracts q twice in the residual.)
    """
    alphas = []
    residual = p
    for _ in range(num_drafts):
        alphas.append(min(float(np.minimum(residual, q).sum()), 1.0))
        rest = np.maximum(residual - q, 0.0)
        mass = rest.sum()
        residual = rest / mass if mass > 0.0 else residual  # else: an event of probability zero
    none_of_first = np.concatenate([[1.0], np.cumprod(1.0 - np.array(alphas))])
    beta = np.array(alphas) * none_of_first[:-1]
    counts = np.zeros((num_drafts + 1, num_drafts + 1))  # [drafts, accepted]
    counts[:, 0] = none_of_first
    for m in range(1, num_drafts + 1):
        for n in range(1, m + 1):
            counts[m, n] = beta[:m] @ counts[m - 1 :: -1, n - 1][:m]
    result: Floats = counts[num_drafts]
    return result


def aligned(layer: DraftLayer, nodes: list[int], law: JointLaw) -> Floats:
    """Return the draft's probabilities of the target's candidates, 0 where it has none.

    A candidate is the same for both if its node and its token are.
    """
    ours = _candidate_ids(nodes, law)
    theirs = _candidate_ids(layer.nodes, layer.law)
    order = np.argsort(theirs)
    place = np.minimum(np.searchsorted(theirs, ours, sorter=order), len(theirs) - 1)
    match = order[place]
    q: Floats = np.where(theirs[match] == ours, layer.law.probabilities()[match], 0.0)
    return q


def _candidate_ids(nodes: list[int], law: JointLaw) -> NDArray[np.int64]:
    """Return one number per candidate: the node in the upper half, the token in the lower."""
    node_ids = np.array(nodes, dtype=np.int64)
    numbers: NDArray[np.int64] = (node_ids[law.parents] << 32) + law.tokens + 1  # STAY is -1
    return numbers
