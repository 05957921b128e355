"""The distributions after the nodes that one engine has computed.

A top-k head returns K tokens of a position, and a search without a draft reads a few of all. If a
further one may be among the best candidates of a layer, all logits of the row are read, as long as
they are there: until the engine's next forward. Those that are gone are computed once more.
"""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import NO_INTS, largest_logits
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beyond_top_k import distributions_beyond_top_k
from dsbd_ort.decoding.distribution import TokenDistribution, TokenDistributions, TopDistributions
from dsbd_ort.decoding.engine_call import ENGINE_INDEX, Role
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution, joint_distribution
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.top_tokens import TopTokens
from dsbd_ort.decoding.warp import Warp, looks_beyond

Floats = NDArray[np.float64]
Slots = NDArray[np.int64]

_NO_NUMBERS = np.zeros(0)
NONE_YET: TokenDistributions = TopDistributions(
    np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0)), None
)


class LeftOut(Enum):
    """The left-out tokens that may matter for some beams, and what was read of them."""

    NOTHING = "no beam may have one"
    READ = "they are known now"
    GONE = "the logits of a beam have to be computed once more"


class LeftOutTokens:
    """The left-out tokens of the nodes that an engine has computed, by slot, until the next prune.

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
        distributions: TokenDistributions,
        slots: Slots,
        log_weights: Floats,
        threshold: float,
        max_tokens: int,
    ) -> LeftOut:
        """Read the ``most`` best tokens of beams that may have a continuation of that log-weight.

        known: the distributions, by slot. slots, log_weights: (num_beams,) int64, float64.
        threshold: least log-weight that matters. most: continuations of all beams together.
        """
        if not isinstance(distributions, TopDistributions) or not self._can_read:
            return LeftOut.NOTHING
        if distributions.num_tokens >= min(max_tokens, self._vocab_size):
            return LeftOut.NOTHING
        unsure = (log_weights + distributions.least(slots) >= threshold).nonzero()[0]
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
            tokens, scores = largest_logits(rows, max_tokens)
            raw = (scores - normalizers)[:, distributions.num_tokens :]
            matters = log_weights[there, None] + raw >= threshold
            read = slots[there]
            self._read_slots = np.append(self._read_slots, read)
            self._slots = np.append(self._slots, np.repeat(read, matters.sum(axis=1)))
            self._tokens = np.append(self._tokens, tokens[:, distributions.num_tokens :][matters])
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


class ComputedDistributions:
    """The distributions after an engine's computed nodes, by slot (see ForestRunner).

    Row 0 is no distribution: an ended beam has slot 0 and stays what it is.

    tops: the most probable tokens after every node, if the request returns them.
    bytes_peak: most bytes that the distributions took.
    """

    def __init__(
        self,
        role: Role,
        spec: EngineSpec,
        forest: Forest,
        warp: Warp,
        processing: RequestProcessing | None,
        tops: TopTokens | None = None,
    ) -> None:
        self._engine, self._is_draft = ENGINE_INDEX[role], role == "draft"
        self._spec, self._forest = spec, forest
        self._warp, self._processing = warp, processing
        self._looks_beyond = looks_beyond(warp, spec)
        self.tops = tops
        self.bytes_peak = 0
        self.known = NONE_YET
        self.left_out = LeftOutTokens(spec)

    def append(self, logits: Logits, nodes: Nodes, first_slot: int) -> None:
        """Add the distributions after nodes of the next slots; ModelError: invalid logits."""
        logits.check(self._spec, len(nodes))
        distributions: TokenDistributions
        if self._processing is not None:
            distributions = self._processing.distributions(logits, nodes, is_draft=self._is_draft)
        elif self._looks_beyond:
            distributions = distributions_beyond_top_k(self._warp, logits, self._spec.vocab_size)
        else:
            distributions = self._warp.distributions(logits)
        if self.tops is not None:
            self.tops.append(logits)
        self.left_out.latest = first_slot, logits
        if self.known is NONE_YET:
            self.known = distributions.after_unused_row()
        else:
            self.known.append(distributions)  # type: ignore[arg-type]  # of the same kind

    def joint(
        self, nodes: Nodes, log_weights: NDArray[np.float64], copies: NDArray[np.int64] | None
    ) -> JointDistribution:
        """Return the joint distribution after beams; ConstraintError: no token may follow."""
        forest = self._forest
        slots = forest.slots[self._engine][nodes]
        joint = joint_distribution(
            nodes, log_weights, copies, self.known, slots, has_ends=forest.has_ends
        )
        if self._processing is not None and not self._is_draft:
            is_stuck = np.bincount(joint.parents, minlength=len(nodes)) == 0
            self._processing.check_continues(nodes[is_stuck], len(joint.tokens))
        if self.left_out.has_tokens:
            joint = self.left_out.added_to(joint, log_weights, slots)
        return joint

    def log_probs(self, nodes: Nodes, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the warped log-probability of one token after each computed node."""
        return self.known.log_probs_of(self._forest.slots[self._engine][nodes], tokens)

    def after(self, node: int) -> TokenDistribution | None:
        """Return the distribution after a node, None if it is not computed or absorbing."""
        slot = int(self._forest.slots[self._engine][node])
        return self.known[slot] if slot > 0 else None

    def keep(self, slots: NDArray[np.int64]) -> None:
        """Keep slot 0 and these, which become 1, 2, ...; without any, all stay as they are."""
        if (num_bytes := self.known.num_bytes) > self.bytes_peak:
            self.bytes_peak = num_bytes
        self.left_out.forget()
        if slots.size:
            self.known.keep(slots)
            if self.tops is not None:
                self.tops.keep(slots)

    def forget(self) -> None:
        self.keep(NO_INTS)
        self.known = NONE_YET
