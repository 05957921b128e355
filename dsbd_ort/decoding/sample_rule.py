"""Rule "sample": layers drawn from the target's distribution (docs/algorithm.md 3.1, 3.2).

And the width of layers by policy "threshold" (3.5).
"""

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

Floats = NDArray[np.float64]


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
        keys = self._forest.candidate_keys(joint)
        if self._replacement:
            scores = [noisy(joint.log_masses, keys, depth, j) for j in range(num_draws)]
            return np.array([score.argmax() for score in scores])
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

    def __init__(self, config: DecodingConfig, builder: LayerBuilder, coupling: Coupling) -> None:
        super().__init__(config, builder)
        self.keeps_descendants = coupling.keeps_descendants
        self.reads_draft_distributions = (
            coupling.reads_draft_distributions or config.width_policy == "threshold"
        )
        self._coupling = coupling
        self.propose, self.draft_scores = coupling.propose, coupling.scores

    def select(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
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
