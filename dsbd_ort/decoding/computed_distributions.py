"""The distributions after the nodes that one engine has computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import NO_INTS
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.beyond_top_k import distributions_beyond_top_k
from dsbd_ort.decoding.distribution import TokenDistribution, TokenDistributions, TopDistributions
from dsbd_ort.decoding.engine_call import ENGINE_INDEX, Role
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution, joint_distribution
from dsbd_ort.decoding.left_out import LeftOut, LeftOutTokens
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.top_tokens import TopTokens
from dsbd_ort.decoding.warp import Warp, looks_beyond

NONE_YET: TokenDistributions = TopDistributions(
    np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0)), np.zeros((0, 0))
)


class ComputedDistributions:
    """The distributions after an engine's computed nodes, by slot (see ForestRunner).

    Row 0 is no distribution: an ended beam has slot 0 and stays what it is.

    Attributes:
        tops: the most probable tokens after every node, if the request returns them.
        left_out: tokens that a top-k head left out.
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
        self._known = NONE_YET
        self.left_out = LeftOutTokens(spec)

    def append(self, logits: Logits, nodes: Nodes, first_slot: int) -> None:
        """Add the distributions after nodes, whose slots are the next ones.

        Raises:
            ModelError: the logits are not those needed, or invalid.
        """
        logits.check(self._spec, len(nodes))
        found: TokenDistributions
        if self._processing is not None:
            found = self._processing.distributions(logits, nodes, is_draft=self._is_draft)
        elif self._looks_beyond:
            found = distributions_beyond_top_k(self._warp, logits, self._spec.vocab_size)
        else:
            found = self._warp.distributions(logits)
        if self.tops is not None:
            self.tops.append(logits)
        self.left_out.latest = first_slot, logits
        if self._known is NONE_YET:
            self._known = found.after_unused_row()
        else:
            self._known.append(found)  # type: ignore[arg-type]  # of the same kind

    def joint(
        self, nodes: Nodes, log_weights: NDArray[np.float64], copies: NDArray[np.int64] | None
    ) -> JointDistribution:
        """Return the joint distribution over the continuations of computed beams.

        Raises:
            ConstraintError: no token may follow a beam of the target.
        """
        forest = self._forest
        slots = forest.slots[self._engine][nodes]
        joint = joint_distribution(
            nodes, log_weights, copies, self._known, slots, has_ends=forest.has_ends
        )
        if self._processing is not None and not self._is_draft:
            is_stuck = np.bincount(joint.parents, minlength=len(nodes)) == 0
            self._processing.check_continues(nodes[is_stuck], len(joint.tokens))
        if self.left_out.has_tokens:
            joint = self.left_out.added_to(joint, log_weights, slots)
        return joint

    def read_left_out(self, beams: Beams, threshold: float, most: int) -> LeftOut:
        """See ForestRunner.read_left_out; ``left_out.gone`` must be computed once more."""
        slots = self._forest.slots[self._engine][beams.nodes]
        return self.left_out.read(self._known, slots, beams.log_weights, threshold, most)

    def log_probs(self, nodes: Nodes, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the warped log-probability of one token after each computed node."""
        return self._known.log_probs_of(self._forest.slots[self._engine][nodes], tokens)

    def after(self, node: int) -> TokenDistribution | None:
        """Return the distribution after a node, None if it is not computed or absorbing."""
        slot = int(self._forest.slots[self._engine][node])
        return self._known[slot] if slot > 0 else None

    def keep(self, slots: NDArray[np.int64]) -> None:
        """Keep slot 0 and these, which become 1, 2, ...; without any, all stay as they are."""
        if (num_bytes := self._known.num_bytes) > self.bytes_peak:
            self.bytes_peak = num_bytes
        self.left_out.forget()
        if slots.size:
            self._known.keep(slots)
            if self.tops is not None:
                self.tops.keep(slots)

    def forget(self) -> None:
        """Forget all of them."""
        self.keep(NO_INTS)
        self._known = NONE_YET
