"""Rule "search": beam search, token for token what transformers' generate(num_beams=W) returns.

As docs/algorithm.md 3.3 states. A layer takes the K best candidates, K = W * (1 + the number
of end-of-sequence ids), at least 2 W. The best W that go on are the next beams; those among the
first W that end enter the pool of at most W finished hypotheses, ranked by logprob / length **
length_penalty. With one beam this is greedy decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams, Hypothesis
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import Warp
from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.joint_distribution import JointDistribution, best_candidates
from dsbd_ort.decoding.rule import (
    Finished,
    NodeDistributions,
    descended,
    extended,
    target_distribution,
)


class SearchRule:
    """Deterministic beam search by the target, with the pool of finished hypotheses."""

    keeps_descendants = True
    reads_draft_distributions = False

    def __init__(self, config: DecodingConfig, forest: Forest) -> None:
        self._config = config
        self._forest = forest
        self._eos = np.array(sorted(config.eos_ids), dtype=np.int64)
        self._num_candidates = config.width * max(2, 1 + len(self._eos))
        self._pool: list[Finished] = []
        # A layer never takes more candidates than this from one beam, so no more are kept.
        most = max((self._num_candidates, config.most_draft_beams + len(self._eos)))
        self.warp = Warp(1.0, most, 1.0, is_raw=True)

    def propose(self, joint: JointDistribution, num_draws: int, depth: int) -> NDArray[np.int64]:
        """Return the draft's best candidates that go on: an ended one is never a beam."""
        return best_candidates(self.draft_scores(joint, depth), num_draws)

    def draft_scores(self, joint: JointDistribution, depth: int) -> NDArray[np.float64]:
        """Return the log-weight of every candidate, -inf where it ends: (num_candidates,)."""
        scores: NDArray[np.float64] = np.where(
            np.isin(joint.tokens, self._eos), -np.inf, joint.log_weights
        )
        return scores

    def select(
        self, target: NodeDistributions, beams: Beams, drafted: list[DraftLayer], depth: int
    ) -> Iterator[Beams]:
        """See SelectionRule.select."""
        while beams.nodes and all(map(target.is_computed, beams.nodes)):
            joint = target_distribution(target, beams)
            best = best_candidates(joint.log_weights, self._num_candidates)
            depth += 1
            ends = np.isin(joint.tokens[best], self._eos) | (depth == self._config.max_new_tokens)
            if self._forest.stop_states:
                ends |= self._forest.stopped(joint, best)
            is_first = np.arange(len(best)) < self._config.width
            self._add_to_pool(extended(beams, joint, best[ends & is_first]))
            beams = descended(self._forest, beams, joint, best[~ends][: self._config.width])
            yield beams

    def is_finished(self, beams: Beams, num_layers: int) -> bool:
        """See SelectionRule.is_finished; the heuristics are those of transformers."""
        if num_layers == self._config.max_new_tokens or not beams.nodes:
            return True
        if len(self._pool) < self._config.width:
            return False
        if self._config.early_stopping is True or self._config.width == 1:
            return True
        length_penalty = self._config.length_penalty
        is_hopeful = self._config.early_stopping == "never" and length_penalty > 0.0
        length = self._config.max_new_tokens if is_hopeful else num_layers
        best_possible = beams.log_weights[0] / length**length_penalty
        return bool(best_possible <= self._pool[-1].score)

    def live(self, beams: Beams) -> list[Hypothesis]:
        """See SelectionRule.live."""
        return [*beams.hypotheses, *(finished.hypothesis for finished in self._pool)]

    def results(self, beams: Beams) -> list[Finished]:
        """See SelectionRule.results."""
        return self._pool

    def _add_to_pool(self, hypotheses: list[Hypothesis]) -> None:
        penalty = self._config.length_penalty
        added = [Finished(hypothesis, hypothesis.score(penalty)) for hypothesis in hypotheses]
        self._pool = sorted([*self._pool, *added], key=lambda f: -f.score)[: self._config.width]
