"""Tables in place of engines: next-token logits that depend on the last token alone."""

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits, Logits, TopLogits
from dsbd_forward.spec import EngineSpec, HeadSpec

NUM_STATES = 512
SPREAD = 2.5  # standard deviation of the logits: about 20 tokens have most of the probability


def random_pair(vocab_size: int, closeness: float) -> tuple[NDArray[np.float32], ...]:
    """Return the logits of a target and of a draft, (NUM_STATES, vocab_size) float32 each.

    The draft's logits are ``closeness`` x the target's + (1 - ``closeness``) x random ones.
    """
    rng = np.random.default_rng(0)
    target, noise = (SPREAD * rng.normal(size=(2, NUM_STATES, vocab_size))).astype(np.float32)
    return target, closeness * target + (1.0 - closeness) * noise


class DenseBigram:
    """An Engine that returns all logits and only counts its cached rows."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.spec = EngineSpec(vocab_size=logits.shape[1])
        self.num_rows = 0
        self._logits = logits

    def forward(self, forward: Forward) -> ForwardResult:
        self.num_rows += forward.num_new
        states = forward.token_ids[forward.logit_rows] % NUM_STATES
        return ForwardResult(self._logits_after(states))

    def keep(self, rows: NDArray[np.int64]) -> None:
        self.num_rows = len(rows)

    def _logits_after(self, states: NDArray[np.int64]) -> Logits:
        return DenseLogits(self._logits[states])


class TopKBigram(DenseBigram):
    """A ``DenseBigram`` with a top-k head: an Engine that returns TopLogits."""

    def __init__(self, logits: NDArray[np.float32], num_top_logits: int) -> None:
        super().__init__(logits)
        head = HeadSpec(num_top_logits=num_top_logits)
        self.spec = EngineSpec(vocab_size=logits.shape[1], head=head)
        self._ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_top_logits]
        self._top = np.take_along_axis(logits, self._ids, axis=1)
        self._sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1)).astype(np.float32)

    def _logits_after(self, states: NDArray[np.int64]) -> Logits:
        return TopLogits(self._ids[states], self._top[states], self._sums[states])
