"""One engine's side of the forest: the nodes it has computed, the distributions after them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.distribution import (
    TokenDistribution,
    TokenDistributions,
    TopDistributions,
)
from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.forest import NO_NODE, NOT_COMPUTED, Forest, Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution, joint_distribution
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, CacheView
from dsbd_ort.decoding.step_model import EngineCall, EngineCalls, FullLogits, Logits, Meter, Role
from dsbd_ort.decoding.warp import Warp, check_logits, largest_logits

_NOTHING = np.arange(0)
_SLOTS = {"target": 0, "draft": 1}  # row of Forest.slots


class ForestCache:
    """The computed nodes of the forest in one engine; none is computed twice while it is live.

    A computed node has a slot, the same in the ``CacheView`` (its row and what that sees) and in
    the distributions. Slot 0 is no node's: it stands for the prompt in the one, for "stays what it
    is" in the other.

    Attributes:
        distribution_bytes_peak: most bytes that the distributions took.
    """

    def __init__(
        self, role: Role, view: CacheView, meter: Meter, forest: Forest, warp: Warp
    ) -> None:
        """Take an engine's view, which begins with the rows of its prefix."""
        self._role = role
        self._view = view
        self._meter = meter
        self._forest = forest
        self._warp = warp
        self._num_calls = 0
        self.distribution_bytes_peak = 0
        self._distributions: TokenDistributions | None = None  # as the first logits are
        self._last_call: tuple[int, FullLogits | None] = 0, None  # its first slot
        self._slots_above: dict[int, int] = {}  # by node to be computed again whose parent is gone

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slot of every node, (num_nodes,) int64: negative where it is not computed."""
        slots: NDArray[np.int64] = self._forest.slots[_SLOTS[self._role]]
        return slots

    def prefill(self, token_ids: NDArray[np.int64]) -> EngineCalls[None]:
        """Compute the prompt but for its last token, which is the forest's root. No logits."""
        tokens, view = token_ids.tolist(), self._view
        for start in range(len(view.prefix.tokens), len(tokens), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            positions = np.arange(start, start + len(chunk))

            def mask(first_row: int, size: int = len(chunk)) -> NDArray[np.bool_]:
                return view.append_prompt(size, first_row)

            logits = yield EngineCall(self._role, self._meter, chunk, positions, _NOTHING, mask)
            self._read(logits, 0)
            view.prefix.tokens = tokens[: start + len(chunk)]
        view.begin()

    def finish(self, agreed_tokens: list[int]) -> None:
        """Leave the rows that all nodes see to the next request.

        agreed_tokens: the prompt and the new tokens that all beams share.
        """
        self._view.end(agreed_tokens)

    def are_computed(self, nodes: Nodes) -> bool:
        """Return whether the distribution after each is known; an absorbing one needs none."""
        return not self.num_missing(nodes)

    def num_missing(self, nodes: Nodes) -> int:
        """Return how many of ``nodes`` are not computed."""
        return int(np.count_nonzero(self.slots[nodes] < 0))

    def _pending(self, nodes: Nodes) -> Nodes:
        """Return what must be computed before the distributions after ``nodes``, parents first."""
        slots = self.slots
        found = nodes[slots[nodes] < 0]
        above = self._missing_parents(found) if len(found) else found
        if not len(above):  # as a rule
            return found
        is_pending = np.zeros(len(slots), dtype=np.bool_)
        is_pending[found] = True
        while len(above):
            is_pending[above] = True
            above = self._missing_parents(above)
        return is_pending.nonzero()[0]

    def _missing_parents(self, nodes: Nodes) -> Nodes:
        """Return the parents of ``nodes`` that are not computed, one for each such node."""
        above: Nodes = self._forest.parents[nodes]
        missing: Nodes = above[(self.slots[above] < 0) & (above != NO_NODE)]
        return missing

    def compute(self, nodes: Nodes | None = None) -> EngineCalls[None]:
        """Compute ``nodes`` (all by default) and their pending ancestors in one call, if any."""
        forest, view, slots = self._forest, self._view, self.slots
        pending = (slots < 0).nonzero()[0] if nodes is None else self._pending(nodes)
        if not len(pending):
            return
        tokens, parents, positions = forest.told(pending)
        rows = np.arange(len(pending))
        first_slot = view.num_slots
        slots[pending] = first_slot + rows
        parent_slots = slots[parents]
        for index in (parents == NO_NODE).nonzero()[0].tolist():  # few: see ``complete``
            parent_slots[index] = self._slots_above.get(int(pending[index]), 0)

        def mask(first_row: int) -> NDArray[np.bool_]:
            return view.append(parent_slots, first_row)

        logits = yield EngineCall(self._role, self._meter, tokens, positions, rows, mask)
        found = self._read(logits, len(rows))
        self._last_call = first_slot, logits[3] if isinstance(logits, tuple) else None
        if self._distributions is None:
            self._distributions = found.behind_unused_row()
        else:
            self._distributions.append(found)  # type: ignore[arg-type]  # of the same kind
        num_bytes = self._distributions.num_bytes
        self.distribution_bytes_peak = max(self.distribution_bytes_peak, num_bytes)

    def joint(
        self, nodes: Nodes, log_weights: NDArray[np.float64], copies: NDArray[np.int64] | None
    ) -> JointDistribution:
        """Return the joint distribution over the continuations of computed beams."""
        assert self._distributions is not None  # of computed nodes
        return joint_distribution(
            nodes,
            log_weights,
            copies,
            self._distributions,
            self.slots[nodes],
            has_ends=self._forest.has_ends,
        )

    def complete(self, beams: Beams, bar: float, most: int) -> bool | None:
        """See NodeDistributions.complete."""
        known, kv = self._distributions, self._view.kv
        if not isinstance(known, TopDistributions) or not kv.keeps_full_logits:
            return None
        if known.num_tokens >= min(most, kv.vocab_size):
            return None
        slots = self.slots[beams.nodes]
        is_unsure = beams.log_weights + known.least_log_probs(slots) >= bar
        unsure = slots[is_unsure]
        if not len(unsure):
            return None
        first_slot, full = self._last_call
        can_read = unsure >= first_slot + full.first_row if full else np.zeros_like(unsure, bool)
        readable = unsure[can_read]
        if full and len(readable):
            tokens, centred, _ = largest_logits(full.read(readable - first_slot), most)
            known.complete(readable, tokens, centred)
        gone = unsure[~can_read]
        if not len(gone):
            return True
        nodes = beams.nodes[is_unsure][~can_read]
        self._slots_above = dict(zip(nodes.tolist(), gone.tolist(), strict=True))
        self._view.forget_own_rows(gone)
        self.slots[nodes] = NOT_COMPUTED
        return False

    def log_probs(self, nodes: Nodes, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the warped log-probability of one token after each computed node."""
        assert self._distributions is not None  # of computed nodes
        return self._distributions.log_probs_of(self.slots[nodes], tokens)

    def distribution(self, node: int) -> TokenDistribution | None:
        """Return the distribution after a node, None for one not computed or absorbing."""
        slot = int(self.slots[node])
        return self._distributions[slot] if slot > 0 and self._distributions is not None else None

    def keep_needed(self, is_kept: NDArray[np.bool_]) -> None:
        """Keep the nodes as well that are needed to compute kept ones later: (num_nodes,) bool."""
        pending = self._pending(is_kept.nonzero()[0])
        is_kept[pending] = True
        parents = self._forest.parents[pending]
        is_kept[parents[parents != NO_NODE]] = True

    def prune(self) -> None:
        """Forget the nodes that the forest has dropped."""
        self._last_call, self._slots_above = (0, None), {}
        slots = self.slots
        computed = (slots > 0).nonzero()[0]
        kept = slots[computed]
        if not len(kept):  # all beams have ended: ``finish`` looks at the rows as they were
            return
        self._view.keep(kept)
        if self._distributions is not None:
            self._distributions.keep(kept)
        slots[computed] = np.arange(1, 1 + len(kept))

    def _read(self, logits: Logits, num_rows: int) -> TokenDistributions:
        """Return the distributions of a call's rows; an error says which call of which engine."""
        self._num_calls += 1
        try:
            check_logits(logits, self._view.kv, num_rows)
            return self._warp.distributions(logits)
        except ModelError as error:
            raise ModelError(f"call {self._num_calls} of the {self._role}: {error}") from error
