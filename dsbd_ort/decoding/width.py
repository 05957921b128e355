"""Width policies: how many beams a layer keeps (docs/algorithm.md 3.5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import DraftLayer
from dsbd_ort.decoding.joint_distribution import JointDistribution

Floats = NDArray[np.float64]


def layer_width(config: DecodingConfig, joint: JointDistribution, layer: DraftLayer) -> int:
    """Return n_t, the width of a drafted layer whose candidates have the distribution ``joint``.

    It reads the distributions of draft and target alone, never what was drawn in this layer:
    otherwise width and content would be correlated and the output not that of beam sampling.
    """
    index = layer.distribution.aligned_to(joint)
    q = np.where(index >= 0, layer.distribution.probabilities()[index], 0.0)
    waits = waiting_distribution(joint.probabilities(), q, len(layer.drawn))
    return threshold_width(waits, config.num_beams, config.smallest_width, config.accept_threshold)


def threshold_width(waits: Floats, most: int, least: int, threshold: float) -> int:
    """Return the largest n in [least, most] with Pr[at least n accepted] >= threshold.

    waits: see ``waiting_distribution``. If no n reaches the threshold: ``least``. The n-th
    acceptance comes after the sum of n waits, so that probability is the mass which their n-fold
    convolution has within the drafts. It never grows with n, which takes powers of two from the
    highest on.
    """
    powers = [np.append(0.0, waits)]  # the first, second, fourth ... power, by number of drafts
    while 2 ** len(powers) <= min(most, len(waits)):
        powers.append(_convolved(powers[-1], powers[-1]))
    of_sum = np.zeros(len(waits) + 1)
    of_sum[0] = 1.0
    width = 0
    for bit in range(len(powers) - 1, -1, -1):
        longer = _convolved(of_sum, powers[bit])
        if longer.sum() >= threshold:
            of_sum, width = longer, width + 2**bit
    return min(max(min(width, len(waits)), least), most)


def _convolved(first: Floats, second: Floats) -> Floats:
    """Return the first entries of the convolution of two arrays of one length."""
    size = len(first)
    if size <= _SHORT:
        return np.convolve(first, second)[:size]
    padded = 1 << (2 * size - 1).bit_length()
    product = np.fft.rfft(first, padded) * np.fft.rfft(second, padded)
    convolved: Floats = np.maximum(np.fft.irfft(product, padded)[:size], 0.0)
    return convolved


_SHORT = 640  # 67 us by products and 107 by the Fourier transform at 512, 234 and 181 at 1,024


def waiting_distribution(p: Floats, q: Floats, num_drafts: int) -> Floats:
    """Return Pr[the k-th draft after an acceptance is the next accepted], (num_drafts,) float64.

    p, q: target and draft distribution on the target's candidates, (num_candidates,) float64; q may
    sum to less than 1. In terms of docs/algorithm.md 3.5 this is beta. The residual after k
    rejections is max(0, p - c_k q) / M(c_k) with M(c) = sum max(0, p - c q), c_0 = 0 and
    c_{k+1} = c_k + M(c_k): subtracting q from a normalised residual subtracts M(c_k) q from what it
    was. So Pr[the first k drafts are rejected] = M(c_k), and M is a sum over the candidates above
    one ratio p / q. (The published code subtracts q twice in the residual.)
    """
    is_drafted = q > 0.0
    p_drafted, q_drafted = p[is_drafted], q[is_drafted]
    ratios = p_drafted / q_drafted
    order = (-ratios).argsort()
    rising = ratios[order][::-1]
    p_sums = np.concatenate([[0.0], p_drafted[order].cumsum()])
    q_sums = np.concatenate([[0.0], q_drafted[order].cumsum()])
    p_elsewhere = max(float(p.sum() - p_sums[-1]), 0.0)
    rejected, multiple = [1.0], 0.0
    for _ in range(num_drafts):
        multiple += rejected[-1]
        above = len(rising) - int(rising.searchsorted(multiple, side="right"))
        mass = p_elsewhere + float(p_sums[above]) - multiple * float(q_sums[above])
        rejected.append(min(max(mass, 0.0), rejected[-1]))
    waits: Floats = -np.diff(rejected)
    return waits
