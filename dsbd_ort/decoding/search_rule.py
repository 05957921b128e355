"""Rule "search": beam search, token for token what transformers' generate(num_beams=W) returns.

As docs/algorithm.md 3.3 states. A layer takes the K best candidates, K = W * (1 + the number
of end-of-sequence ids), at least 2 W. The best W that go on are the next beams; those among the
first W that end enter the pool of at most W finished hypotheses, ranked by logprob / length **
length_penalty. With one beam this is greedy decoding.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.computed_distributions import LeftOut
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import DraftLayer
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.rule import Finished, LayerBuilder, SelectionRule, is_decided
from dsbd_ort.decoding.warp import num_searched


class SearchRule(SelectionRule):
    """Deterministic beam search by the target, with the pool of finished hypotheses."""

    def __init__(self, config: DecodingConfig, builder: LayerBuilder) -> None:
        super().__init__(config, builder)
        self._eos = [np.array(token) for token in sorted(config.eos_ids)]
        self._num_candidates = num_searched(config)
        self._pool = Finished(np.arange(0), np.zeros(0))

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Return the draft's best candidates that go on: an ended one is never a beam."""
        return best_candidates(self.draft_scores(joint, depth), num_draws)

    def draft_scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """Return the log-weight of every candidate, -inf if it ends: (num_candidates,)."""
        scores = joint.log_weights.copy()
        scores[self._is_eos(joint.tokens)] = -np.inf
        return scores

    def _is_eos(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_eos = np.zeros(len(tokens), dtype=np.bool_)
        for eos in self._eos:  # few: faster than one operation on all
            is_eos |= tokens == eos
        return is_eos

    def select(
        self, target: ForestRunner, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        width = self._config.num_beams
        while len(beams.nodes) and target.are_computed(beams.nodes):
            joint, best = self._best(target, beams)
            is_full = len(best) == self._num_candidates
            threshold = joint.log_weights[best[-1]] if is_full else -np.inf
            left_out = target.read_left_out(beams, threshold, self._num_candidates)
            if left_out is LeftOut.GONE:
                return
            if left_out is LeftOut.READ:
                joint, best = self._best(target, beams)
            depth += 1
            ends = self._is_eos(joint.tokens[best]) | (depth == self._config.max_new_tokens)
            if self._builder.forest.path_states:
                ends |= self._builder.forest.stopped(joint, best)
            if len(ends[:width].nonzero()[0]):
                finished = best[:width][ends[:width]]
                hypotheses = self._builder.extended(beams, joint, finished)
                lengths = self._builder.hypotheses.lengths[hypotheses].astype(np.float64)
                # By the processed log-probability, as transformers does.
                scores = joint.log_weights[finished] / lengths**self._config.length_penalty
                hypotheses = np.append(self._pool.hypotheses, hypotheses)
                scores = np.append(self._pool.scores, scores)
                self._pool = Finished(hypotheses, scores).ranked().first(width)
            beams = self._builder.descended(beams, joint, best[~ends][:width])
            yield beams

    def _best(
        self, target: ForestRunner, beams: Beams
    ) -> tuple[JointDistribution, NDArray[np.int64]]:
        joint = target.joint(beams.nodes, beams.log_weights, None)
        return joint, best_candidates(joint.log_weights, self._num_candidates)

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """See SelectionRule.is_finished; the heuristics are those of transformers."""
        if num_layers == self._config.max_new_tokens or not len(beams.nodes):
            return True
        if len(self._pool.scores) < self._config.num_beams:
            return False
        last_score, best_logprob = float(self._pool.scores[-1]), float(beams.log_weights[0])
        return self._config.num_beams == 1 or is_decided(
            self._config, last_score, best_logprob, num_layers
        )

    def live(self, beams: Beams) -> NDArray[np.int64]:
        return np.concatenate([beams.hypotheses, self._pool.hypotheses])

    def ended(self) -> Finished:
        return self._pool

    def results(self, beams: Beams) -> Finished:
        return self._pool
