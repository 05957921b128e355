"""Tokens that were left out of the distributions after nodes, and are read once they matter.

A top-k head returns K tokens of a position, and a search without a draft reads a few of all. If a
further one may be among the best candidates of a layer, all logits of the row are read, as long as
they are there: until the engine's next forward. Those that are gone are computed once more.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import NO_INTS, largest_logits
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.distribution import TokenDistributions, TopDistributions
from dsbd_ort.decoding.joint_distribution import JointDistribution

Floats = NDArray[np.float64]
Slots = NDArray[np.int64]

_NO_NUMBERS = np.zeros(0)


class LeftOut(Enum):
    """The left-out tokens that may matter for some beams, and what was read of them."""

    NOTHING = "no beam may have one"
    READ = "they are known now"
    GONE = "the logits of a beam have to be computed once more"


class LeftOutTokens:
    """The left-out tokens of the nodes that an engine has computed, by slot, until the next prune.

    Attributes:
        gone: (n,) int64. Which of the beams that were asked about last have lost their logits.
        latest: first slot and logits of the engine's latest call, set by the caller.
        has_tokens: whether any were read that matter.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Take the specification of the engine: one that keeps no other logits leaves them out."""
        self._can_read = not spec.head.num_top_logits or spec.head.keeps_full_logits
        self._vocab_size = spec.vocab_size
        self.forget()

    def forget(self) -> None:
        """Forget all of them: slots have other nodes from now on."""
        self.gone = NO_INTS
        self.latest: tuple[int, Logits] | None = None
        self._read_slots = self._slots = self._tokens = NO_INTS  # (n,); (num_tokens,) by slot
        self._raw_log_probs = _NO_NUMBERS
        self.has_tokens = False

    def read(
        self,
        known: TokenDistributions,
        slots: Slots,
        log_weights: Floats,
        threshold: float,
        most: int,
    ) -> LeftOut:
        """Read the ``most`` best tokens of beams that may have a continuation of that log-weight.

        Args:
            known: the distributions, by slot.
            slots: (num_beams,) int64.
            log_weights: (num_beams,) float64.
            threshold: least log-weight that matters.
            most: continuations that matter, of all beams together.
        """
        if not isinstance(known, TopDistributions) or not self._can_read:
            return LeftOut.NOTHING
        if known.num_tokens >= min(most, self._vocab_size):
            return LeftOut.NOTHING
        unsure = (log_weights + known.least(slots) >= threshold).nonzero()[0]
        unsure = unsure[~np.isin(slots[unsure], self._read_slots)]
        if not len(unsure):
            return LeftOut.NOTHING
        full = None if self.latest is None else self.latest[1].full
        if self.latest is None or full is None:
            self.gone = unsure
            return LeftOut.GONE
        first_slot, logits = self.latest
        is_there = slots[unsure] >= first_slot
        there, self.gone = unsure[is_there], unsure[~is_there]
        if len(there):
            rows, normalizers = logits.read(slots[there] - first_slot)
            tokens, scores = largest_logits(rows, most)
            raw = (scores - normalizers)[:, known.num_tokens :]
            matters = log_weights[there, None] + raw >= threshold
            read = slots[there]
            self._read_slots = np.append(self._read_slots, read)
            self._slots = np.append(self._slots, np.repeat(read, matters.sum(axis=1)))
            self._tokens = np.append(self._tokens, tokens[:, known.num_tokens :][matters])
            self._raw_log_probs = np.append(self._raw_log_probs, raw[matters])
            self.has_tokens = len(self._tokens) > 0
        return LeftOut.GONE if len(self.gone) else LeftOut.READ

    def added_to(
        self, joint: JointDistribution, log_weights: Floats, slots: Slots
    ) -> JointDistribution:
        """Return a raw joint distribution of the beams at ``slots`` with their left-out tokens."""
        order = slots.argsort()
        place = order.take(slots.searchsorted(self._slots, sorter=order), mode="clip")
        is_here = slots[place] == self._slots
        beams, raw = place[is_here], self._raw_log_probs[is_here]
        parents = np.append(joint.parents, beams)
        order = parents.argsort(kind="stable")
        weights = np.append(joint.log_weights, log_weights[beams] + raw)[order]
        return JointDistribution(
            nodes=joint.nodes,
            parents=parents[order],
            tokens=np.append(joint.tokens, self._tokens[is_here])[order],
            log_weights=weights,
            log_masses=weights,
            raw_log_probs=np.append(joint.raw_log_probs, raw)[order],
            num_tokens=0,
        )
