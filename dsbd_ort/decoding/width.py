"""Width policies: how many beams a layer keeps (docs/algorithm.md 3.5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.joint_distribution import JointDistribution

Floats = NDArray[np.float64]


def layer_width(config: DecodingConfig, joint: JointDistribution, layer: DraftLayer | None) -> int:
    """Return n_t, the width of a layer whose candidates have the target distribution ``joint``.

    It reads the distributions of draft and target alone, never what was drawn in this layer:
    otherwise width and content would be correlated and the output not that of beam sampling. A
    layer behind the drafted ones (``layer`` None) always has the full width.
    """
    if config.width_policy == "fixed" or layer is None:
        return config.width
    index = layer.distribution.aligned_to(joint)
    q = np.where(index >= 0, layer.distribution.probabilities()[index], 0.0)
    return threshold_width(
        acceptance_counts(joint.probabilities(), q, len(layer.drawn)),
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

    p, q: target and draft distribution on the target's candidates, (num_candidates,) float64; q may
    sum to less than 1. ``alpha[k]``: the k-th draft since the last acceptance is accepted;
    ``beta[k]``: it is the first to be. (The published code subtracts q twice in the residual.)
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
