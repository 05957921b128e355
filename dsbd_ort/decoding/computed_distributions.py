"""The distributions after the nodes that one engine has computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import NO_INTS
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.distribution import (
    Rows,
    TokenDistribution,
    TokenDistributions,
    TopDistributions,
)
from dsbd_ort.decoding.engine_call import ENGINE_INDEX, Role
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution, joint_distribution
from dsbd_ort.decoding.left_out import LeftOut, LeftOutTokens
from dsbd_ort.decoding.logits_reader import LogitsReader
from dsbd_ort.decoding.top_tokens import KeptTopTokens, TopTokens

NONE_YET: TokenDistributions = TopDistributions(
    np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0)), np.zeros((0, 0))
)


class ComputedDistributions:
    """The distributions after an engine's computed nodes, by slot (see ForestRunner).

    Row 0 is no distribution: an ended beam has slot 0 and stays what it is.

    Attributes:
        tops: keeps the most probable tokens after every node.
        kept_tops: the same, if the request returns them.
        bytes_peak: most bytes that the distributions took.
    """

    def __init__(
        self,
        role: Role,
        spec: EngineSpec,
        forest: Forest,
        reader: LogitsReader,
        tops: TopTokens,
    ) -> None:
        """Take the parts of an engine's distributions; nothing is computed yet."""
        self._engine = ENGINE_INDEX[role]
        self._spec = spec
        self._forest = forest
        self._reader = reader
        self.tops = tops
        self.kept_tops = [tops] if isinstance(tops, KeptTopTokens) else []
        self.bytes_peak = 0
        self._known = NONE_YET
        self._left_out = LeftOutTokens(spec)

    def append(self, logits: Logits, nodes: Nodes, first_slot: int) -> None:
        """Add the distributions after nodes, whose slots are the next ones.

        Raises:
            ModelError: the logits are not those needed, or invalid.
        """
        logits.check(self._spec, len(nodes))
        found = self._reader.distributions(logits, nodes)
        for tops in self.kept_tops:
            tops.append(logits)
        self._left_out.latest = first_slot, logits
        if self._known is NONE_YET:
            self._known = found.after_unused_row()
        else:
            self._known.append(found)  # type: ignore[arg-type]  # of the same kind

    def joint(
        self, nodes: Nodes, log_weights: NDArray[np.float64], copies: NDArray[np.int64] | None
    ) -> JointDistribution:
        """Return the joint distribution over the continuations of computed beams."""
        forest = self._forest
        slots = forest.slots[self._engine][nodes]
        joint = joint_distribution(
            nodes, log_weights, copies, self._known, slots, has_ends=forest.has_ends
        )
        for check in self._reader.checks:
            check(joint)
        if self._left_out.has_tokens:
            joint = self._left_out.added_to(joint, log_weights, slots)
        return joint

    def read_left_out(self, beams: Beams, threshold: float, most: int) -> LeftOut:
        """See NodeDistributions.read_left_out; ``gone`` must be computed once more."""
        slots, weights = self._forest.slots[self._engine][beams.nodes], beams.log_weights
        return self._left_out.read(self._known, slots, weights, threshold, most)

    @property
    def gone(self) -> Rows:
        """Which of the beams that ``read_left_out`` was called with are GONE, (n,) int64."""
        return self._left_out.gone

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
        self._left_out.forget()
        if slots.size:
            self._known.keep(slots)
            for tops in self.kept_tops:
                tops.keep(slots)

    def forget(self) -> None:
        """Forget all of them."""
        self.keep(NO_INTS)
        self._known = NONE_YET
