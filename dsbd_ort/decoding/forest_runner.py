"""One engine's side of the forest: the nodes it has computed, the distributions after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_forward.logits import Logits
from dsbd_forward.rows import NO_INTS
from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.beyond_top_k import distributions_beyond_top_k
from dsbd_ort.decoding.cache_view import CacheView, RowIdentity
from dsbd_ort.decoding.distribution import (
    TokenDistribution,
    TokenDistributions,
)
from dsbd_ort.decoding.drafting.draft import LayerNeeds
from dsbd_ort.decoding.engine_call import EngineCall, EngineCalls, Role, Wanted
from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.forest import NO_NODE, NOT_COMPUTED, Forest, Nodes
from dsbd_ort.decoding.joint_distribution import (
    JointDistribution,
    joint_distribution,
)
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK
from dsbd_ort.decoding.left_out import LeftOut, LeftOutTokens
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedAfter
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.node_features import NO_FEATURES, FeatureNeeds, NodeFeatures
from dsbd_ort.decoding.top_tokens import PromptScorer, TopTokens
from dsbd_ort.decoding.warp import Warp, looks_beyond

SCORED_CHUNK = 64
"""Prompt rows per call where each has logits: bounds these at SCORED_CHUNK x vocabulary."""
_FIRST = np.array(0)  # slot; an operation takes an array faster than a number


class ForestRunner:
    """The computed nodes of the forest in one engine; none is computed twice while it is live.

    But for those of a feature draft whose rows are outdated, see ``node_features``.

    A computed node has a slot, the same in the ``CacheView`` (its row and what that sees) and in
    the distributions. Slot 0 is no node's: it stands for the prompt in the one, for "stays what it
    is" in the other.

    Attributes:
        meter: counts the engine calls of the request.
        distribution_bytes_peak: most bytes that the distributions took.
        forces: see Drafter: a model forces nothing.
        is_put_off: whether nothing is kept for its next call, see ``put_off``.
    """

    forces = False

    def __init__(
        self,
        role: Role,
        view: CacheView,
        forest: Forest,
        warp: Warp,
        processing: RequestProcessing | None,
        features: NodeFeatures | None = None,
        tops: TopTokens | None = None,
    ) -> None:
        """Take an engine's view, which begins with the rows of its prefix.

        Args:
            role: of the engine.
            view: of its cache.
            forest: of the request.
            warp: of the logits.
            processing: the processors and the constraint, None without any.
            features: of the nodes, for a request with a feature draft.
            tops: keeps the most probable tokens after every node, for a request that returns them.
        """
        self._role = role
        self._engine = ("target", "draft").index(role)  # row of Forest.slots
        self._view = view
        self.meter = view.meter
        self._forest = forest
        self._warp = warp
        self._processing = processing
        self._tops = tops
        self._features = features
        self._num_calls = 0
        self._unread: Callable[[], Sequence[int]] | None = None
        self._num_unread = 0
        self.is_put_off = False
        self.distribution_bytes_peak = 0
        self._distributions: TokenDistributions | None = None  # as the first logits are
        self._left_out = LeftOutTokens(view.spec)
        self._looks_beyond = looks_beyond(warp, view.spec)

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slot of every node, see ``Forest.slots``: negative where it is not computed."""
        return self._forest.slots[self._engine]

    def prefill(
        self,
        token_ids: NDArray[np.int64],
        scorer: PromptScorer | None = None,
        lockstep_draft: ForestRunner | None = None,
    ) -> EngineCalls[None]:
        """Compute the prompt but for its last token, which is the forest's root.

        scorer: takes the logits after every token, of a prefix that is not there yet at all. None:
            no logits are computed.
        lockstep_draft: computes every part of the prompt as soon as it is computed here.
        """
        tokens, view = token_ids.tolist(), self._view
        size = SCORED_CHUNK if scorer else PREFILL_CHUNK
        for start in range(len(view.prefix.tokens), len(tokens), size):
            chunk = token_ids[start : start + size]
            logit_rows = np.arange(len(chunk) if scorer else 0)
            features = (
                self._features.for_prompt(start, len(chunk)) if self._features else NO_FEATURES
            )
            wanted: Wanted = "no logits"
            if scorer:
                wanted = "logits again" if view.spec.head.num_top_logits else "all logits"
            call = EngineCall(
                self._role,
                self.meter,
                len(chunk),
                partial(self._prompt_forward, chunk, start, logit_rows, features),
                wanted,
                view.prefix.source,
                is_prefill=True,
            )
            result = yield call
            self._num_calls += 1
            try:
                result.logits.check(view.spec, len(logit_rows), 0)
            except ModelError as error:
                raise self._error(error) from error
            if scorer:
                scorer.append(result.logits)
            view.prefix.tokens = tokens[: start + len(chunk)]
            if self._features:
                self._features.take_prompt(result, start, len(chunk))
            if lockstep_draft is not None:
                yield from lockstep_draft.prefill(token_ids[: start + len(chunk)])
        view.begin()

    def _prompt_forward(
        self,
        chunk: NDArray[np.int64],
        start: int,
        logit_rows: NDArray[np.int64],
        features: FeatureNeeds,
        first_row: int,
    ) -> Forward:
        """Return the forward of a part of the prompt, from position ``start`` on."""
        mask = self._view.append_prompt(len(chunk), first_row)
        positions = np.arange(start, start + len(chunk))
        source = self._view.prefix.source
        return Forward(chunk, positions, mask, logit_rows, None, *features, source=source)

    def prefill_later(self, tokens: Callable[[], Sequence[int]], node: int) -> None:
        """Compute all tokens but the last just before the first node, if one is wanted.

        A request that nothing is drafted for never has its prompt read by the draft.

        tokens: returns the prompt, and the path to the node, which ends with the last of them.
        """
        forest = self._forest
        self._unread, self._num_unread = tokens, int(forest.positions[node])
        forest.slots[self._engine][forest.parents[node]] = 0  # what it sees is that prompt

    def put_off(self, tokens: Callable[[], list[int]]) -> None:
        """Keep nothing for a next call but the rows of the one path, until ``prefill_later``.

        tokens: returns the prompt and the path.
        """
        self.is_put_off = True
        if self._unread is not None:
            return
        slots = self.slots[: len(self._forest)]
        computed = (slots > _FIRST).nonzero()[0]
        self._view.keep(slots[computed])
        self._view.end(tokens())
        self._unread = tokens
        slots[computed] = NOT_COMPUTED
        self._left_out.forget()
        self._note_bytes()
        self._distributions = None

    @property
    def num_unread(self) -> int:
        """Tokens that the engine has to read as a prompt before the first node."""
        return 0 if self._unread is None else self._num_unread - len(self._view.prefix.tokens)

    @property
    def num_unread_source(self) -> int:
        """Tokens of the source that the engine has to read before the first node."""
        source = self._view.prefix.source
        is_unread = self._view.spec.reads_source and not self._num_calls
        return len(source) if is_unread and isinstance(source, tuple) else 0

    def _read_prompt(self) -> EngineCalls[None]:
        """Compute the prompt, but for what another request has computed by now."""
        assert self._unread is not None
        view, token_ids = self._view, list(self._unread())[:-1]
        self._unread, self.is_put_off = None, False
        shared = view.row_cache.longest_prefix(RowIdentity(token_ids, view.prefix.source))
        if len(shared.tokens) > len(view.prefix.tokens):
            view.prefix = shared
        yield from self.prefill(np.array(token_ids, dtype=np.int64))

    def finish(self, agreed_tokens: list[int]) -> None:
        """Leave the rows that all nodes see to the next request.

        agreed_tokens: the prompt and the new tokens that all beams share.
        """
        if self._unread is None:  # else its rows are those of an earlier prompt that began alike
            self._view.end(agreed_tokens)

    def are_computed(self, nodes: Nodes) -> bool:
        """Return whether the distribution after each is known; an absorbing one needs none."""
        slots = self._forest.slots[self._engine][nodes]
        return not len((slots < _FIRST).nonzero()[0])

    def num_missing(self, nodes: Nodes) -> int:
        """Return how many of ``nodes`` are not computed."""
        return len((self._forest.slots[self._engine][nodes] < _FIRST).nonzero()[0])

    def pending(self, nodes: Nodes, slots: NDArray[np.int64] | None = None) -> Nodes:
        """Return what must be computed before the distributions after ``nodes``, parents first.

        slots: other ones than those of now.
        """
        forest = self._forest
        parents = forest.parents
        if slots is None:
            slots = forest.slots[self._engine]
        found = nodes[slots[nodes] < _FIRST]
        above = parents[found]
        above = above[slots[above] < _FIRST]
        if not len(above):  # as a rule
            return found
        is_pending = np.zeros(len(slots), dtype=np.bool_)
        is_pending[found] = True
        trunk = forest.trunk_length
        while len(above):
            is_pending[above] = True
            in_trunk = above[above < trunk]
            if len(in_trunk):  # a draft that rests has all tokens since it rests to compute
                for last in set(in_trunk.tolist()):
                    computed = (slots[: last + 1] >= _FIRST).nonzero()[0]
                    is_pending[computed[-1] + 1 if len(computed) else 0 : last] = True
                above = above[above >= trunk]
            above = parents[above]
            above = above[slots[above] < _FIRST]
        return is_pending.nonzero()[0]

    def look_up(self, nodes: Nodes, takes_all: object) -> LayerNeeds:
        """See Drafter.look_up: every row needs the model, and what it has not computed above."""
        return LayerNeeds(self.pending(nodes))

    def compute(self, pending: Nodes | None = None) -> EngineCalls[None]:
        """Compute nodes as ``pending`` returns them (all that are by default) in one call, if any.

        Further calls are needed where logits count that a top-k head has left out and that a later
        part of the same forward has overwritten: each call brings some of them. And of a feature
        draft for nodes that come from features of the call before.
        """
        forest, view = self._forest, self._view
        slots = forest.slots[self._engine]
        if pending is None:
            pending = (slots[: len(forest)] < _FIRST).nonzero()[0]
        if len(pending) and self._unread is not None:
            yield from self._read_prompt()
        while len(pending):
            nodes = pending if self._features is None else self._features.ready(pending)
            size, first_slot = len(nodes), view.num_slots
            allowed = None if self._processing is None else self._processing.allowed_after(nodes)
            result = yield self._call(nodes, allowed)
            self._num_calls += 1
            if self._features:
                self._features.take(result, size)
            logits = result.logits
            found, unread = self._read(logits, nodes, allowed)
            if self._tops is not None:
                self._tops.append(logits)
            self._left_out.latest = first_slot, logits
            if self._distributions is None:
                self._distributions = found.behind_unused_row()
            else:
                self._distributions.append(found)  # type: ignore[arg-type]  # of the same kind
            if len(unread):
                self._set_back(nodes[unread])
            elif size == len(pending):  # as a rule
                break
            pending = pending[slots[pending] < 0]

    def _call(self, nodes: Nodes, allowed: AllowedAfter | None) -> EngineCall:
        """Return the call that computes these nodes, and give them their slots."""
        forest, view, size = self._forest, self._view, len(nodes)
        slots, left_out = forest.slots[self._engine], self._left_out
        features = self._features.for_nodes(nodes) if self._features else NO_FEATURES
        slots[nodes] = np.arange(view.num_slots, view.num_slots + size)
        parents = forest.parents[nodes]
        parent_slots = slots[parents]
        if left_out.slots_above:
            left_out.add_slots_above(parent_slots, nodes, parents)
        gather = allowed.pairs() if allowed is not None and self._gathers(allowed) else None

        def forward_at(first_row: int) -> Forward:
            return Forward(
                tokens,
                positions,
                view.append(parent_slots, first_row),
                np.arange(size),
                gather,
                *features,
                source=source,
            )

        tokens, positions = forest.tokens[nodes], forest.positions[nodes]
        wanted: Wanted = "all logits" if gather is None else "some logits"
        num_top = view.spec.head.num_top_logits
        has_few = self._tops is not None and 0 < num_top < self._tops.number
        if has_few or left_out.slots_above:  # computed once more: no rows of others lie behind
            wanted = "logits again"
        source = view.prefix.source
        return EngineCall(self._role, self.meter, size, forward_at, wanted, source)

    def _gathers(self, allowed: AllowedAfter) -> bool:
        """Return whether the logits of the allowed tokens alone are wanted of the engine."""
        assert self._processing is not None
        notes_others = self._tops is not None or (
            self._role == "target" and self._processing.forbidden is not None
        )
        return self._view.spec.head.gathers_logits and allowed.lists and not notes_others

    def joint(
        self, nodes: Nodes, log_weights: NDArray[np.float64], copies: NDArray[np.int64] | None
    ) -> JointDistribution:
        """Return the joint distribution over the continuations of computed beams."""
        assert self._distributions is not None  # of computed nodes
        slots = self._forest.slots[self._engine][nodes]
        joint = joint_distribution(
            nodes,
            log_weights,
            copies,
            self._distributions,
            slots,
            has_ends=self._forest.has_ends,
        )
        if self._processing is not None and self._role == "target":
            is_stuck = np.bincount(joint.parents, minlength=len(nodes)) == 0
            self._processing.check_continues(nodes[is_stuck], len(joint.tokens))
        if self._left_out.has_tokens:
            joint = self._left_out.added_to(joint, log_weights, slots)
        return joint

    def read_left_out(self, beams: Beams, threshold: float, most: int) -> LeftOut:
        """See NodeDistributions.read_left_out."""
        slots, known = self.slots[beams.nodes], self._distributions
        found = self._left_out.read(known, slots, beams.log_weights, threshold, most)
        if found is LeftOut.GONE:
            self._set_back(beams.nodes[self._left_out.gone])
        return found

    def _set_back(self, nodes: Nodes) -> None:
        """Let these nodes count as not computed; what their parents see remains known."""
        slots = self.slots[nodes]
        self._left_out.set_back(nodes, slots)
        self._view.forget_own_rows(slots)
        self.slots[nodes] = NOT_COMPUTED

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
        if self.is_put_off:
            return
        slots = None if self._features is None else self._slots_after_pruning(self._features)
        pending = self.pending(is_kept.nonzero()[0], slots)
        is_kept[pending] = True
        parents = self._forest.parents[pending]
        is_kept[parents[parents != NO_NODE]] = True

    def _slots_after_pruning(self, features: NodeFeatures) -> NDArray[np.int64]:
        """Return the slots without those that pruning will take from their nodes."""
        return np.where(features.outdated(self.slots), NOT_COMPUTED, self.slots)

    def prune(self) -> None:
        """Forget the nodes that the forest has dropped, and what is outdated."""
        if self.is_put_off:
            return
        self._note_bytes()
        self._left_out.forget()
        slots = self._forest.slots[self._engine][: len(self._forest)]
        if self._features is not None:
            slots[:] = self._slots_after_pruning(self._features)[: len(slots)]
        computed = (slots > _FIRST).nonzero()[0]
        kept = slots[computed]
        num_kept = len(kept)
        if not num_kept:  # all beams have ended: ``finish`` looks at the rows as they were
            return
        self._view.keep(kept)
        if self._distributions is not None:
            self._distributions.keep(kept)
        if self._tops is not None:
            self._tops.keep(kept)
        if self._features is not None:
            self._features.keep(kept)
        slots[computed] = np.arange(1, 1 + num_kept)

    def _note_bytes(self) -> None:
        if self._distributions is not None:
            num_bytes = self._distributions.num_bytes
            self.distribution_bytes_peak = max(self.distribution_bytes_peak, num_bytes)

    def _error(self, error: ModelError) -> ModelError:
        return ModelError(f"call {self._num_calls} of the {self._role}: {error}")

    def _read(
        self, logits: Logits, nodes: Nodes, allowed: AllowedAfter | None
    ) -> tuple[TokenDistributions, NDArray[np.int64]]:
        """Return the distributions after nodes, and the rows that have to be computed once more.

        allowed: after them, None without processors or constraint.
        """
        spec, num_pairs = self._view.spec, 0
        if allowed is not None and self._gathers(allowed):
            num_pairs = allowed.num_pairs
        try:
            logits.check(spec, len(nodes), num_pairs)
            if self._processing is None or allowed is None:
                if self._looks_beyond:
                    return distributions_beyond_top_k(self._warp, logits, spec.vocab_size)
                return self._warp.distributions(logits), NO_INTS
            is_draft = self._role == "draft"
            return self._processing.distributions(logits, nodes, allowed, is_draft=is_draft)
        except ModelError as error:
            raise self._error(error) from error
