"""One engine's rows of the forest: the nodes that it has computed, and the calls that do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_ort.decoding.beams import Beams, Hypotheses
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.computed_distributions import ComputedDistributions, LeftOut
from dsbd_ort.decoding.drafting.draft import LayerNeeds
from dsbd_ort.decoding.drafting.draft_context import DraftContext
from dsbd_ort.decoding.engine_call import ENGINE_INDEX, EngineCall, EngineCalls, Role
from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.forest import NO_NODE, NOT_COMPUTED, Forest, Nodes
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, PrefixCache, RowIdentity
from dsbd_ort.decoding.node_features import NO_FEATURES, FeatureNeeds, NodeFeatures
from dsbd_ort.decoding.top_tokens import SCORED_CHUNK, PromptScorer


class ForestRunner:
    """The computed nodes of the forest in one engine; none is computed twice while it is live.

    Except those of a feature draft whose rows are outdated, see ``node_features``. A computed node
    has a slot, the same in the ``CacheView`` (its row and what that sees) and in the distributions.
    Slot 0 is reserved: the prompt in the former, "stays what it is" in the latter.

    scorer: takes the logits after the prompt's tokens, if the request returns these.
    forces: see Drafter: a model forces nothing.
    """

    forces = False
    _offset = 0  # of the engine's positions: the forest's position 5 is its position 5 - _offset

    def __init__(
        self,
        role: Role,
        view: CacheView,
        forest: Forest,
        distributions: ComputedDistributions,
        features: Sequence[NodeFeatures] = (),
        scorer: PromptScorer | None = None,
    ) -> None:
        self._role = role
        self._engine = ENGINE_INDEX[role]
        self._view = view
        self.meter = view.meter
        self.forest = forest
        self.distributions = distributions
        self.joint, self.log_probs = distributions.joint, distributions.log_probs
        self._features = features
        self.scorer = scorer
        self._num_calls = 0
        self._slots_above: dict[int, int] = {}  # by node set back: a slot that sees what is above

    @property
    def slots(self) -> NDArray[np.int64]:
        return self.forest.slots[self._engine]

    def prefill(
        self, token_ids: NDArray[np.int64], followers: Sequence[ForestRunner] = ()
    ) -> EngineCalls[None]:
        """Compute the prompt except its last token; ``followers`` compute every part after it."""
        tokens, view, scorer = token_ids.tolist(), self._view, self.scorer
        size = PREFILL_CHUNK if scorer is None else SCORED_CHUNK
        for start in range(len(view.prefix.tokens), len(tokens), size):
            chunk = token_ids[start : start + size]
            logit_rows = np.arange(0 if scorer is None else len(chunk))
            needs = NO_FEATURES
            for features in self._features:
                needs = features.for_prompt(start, len(chunk))
            result = yield EngineCall(
                self._role,
                self.meter,
                len(chunk),
                partial(self._prompt_forward, chunk, start, logit_rows, needs),
                view.prefix.source,
                is_prefill=True,
            )
            self._num_calls += 1
            try:
                result.logits.check(view.spec, len(logit_rows))
            except ModelError as error:
                raise self._error(error) from error
            if scorer is not None:
                scorer.append(result.logits)
            view.prefix.tokens = tokens[: start + len(chunk)]
            for features in self._features:
                features.take_prompt(result, start, len(chunk))
            for follower in followers:
                yield from follower.prefill(token_ids[: start + len(chunk)])
        view.begin()
        for follower in followers:
            yield from follower.prefill(token_ids)

    def _prompt_forward(
        self,
        chunk: NDArray[np.int64],
        start: int,
        logit_rows: NDArray[np.int64],
        features: FeatureNeeds,
        first_row: int,
    ) -> Forward:
        mask = self._view.append_prompt(len(chunk), first_row)
        positions = np.arange(start, start + len(chunk))
        source = self._view.prefix.source
        return Forward(
            chunk, positions, mask, logit_rows, *features, source=source, is_ordered=True
        )

    def finish(self, agreed_tokens: list[int]) -> None:
        """Leave the rows of the prompt and the new tokens that all beams share to the next one."""
        self._view.end(agreed_tokens)

    def are_computed(self, nodes: Nodes) -> bool:
        """Return whether the distribution after each is known; an absorbing one needs none."""
        slots = self.forest.slots[self._engine][nodes]
        return not len((slots < 0).nonzero()[0])

    def missing(self) -> Nodes:
        slots = self.forest.slots[self._engine]
        return (slots[: len(self.forest)] < 0).nonzero()[0]

    def pending(self, nodes: Nodes) -> Nodes:
        return self.forest.pending(nodes, self.forest.slots[self._engine])

    def look_up(self, nodes: Nodes, takes_all: object) -> LayerNeeds:
        """See Drafter.look_up: every row needs the model, and what it has not computed above."""
        return LayerNeeds(self.forest.pending(nodes, self.forest.slots[self._engine]))

    def compute(self, pending: Nodes) -> EngineCalls[None]:
        """Compute ``pending`` or ``missing`` nodes in one call; a feature draft needs several."""
        slots, distributions = self.forest.slots[self._engine], self.distributions
        while len(pending):
            nodes, first_slot = pending, self._view.num_slots
            for features in self._features:
                nodes = features.ready(nodes)
            result = yield self._call(nodes)
            self._num_calls += 1
            for features in self._features:
                features.take(result, len(nodes))
            try:
                distributions.append(result.logits, nodes, first_slot)
            except ModelError as error:
                raise self._error(error) from error
            if len(nodes) == len(pending):  # usually
                break
            pending = pending[slots[pending] < 0]

    def _call(self, nodes: Nodes) -> EngineCall:
        """Return the call that computes these nodes, and give them their slots."""
        forest, view, size = self.forest, self._view, len(nodes)
        slots, features = forest.slots[self._engine], NO_FEATURES
        for node_features in self._features:
            features = node_features.for_nodes(nodes)
        slots[nodes] = np.arange(view.num_slots, view.num_slots + size)
        parents = forest.parents[nodes]
        parent_slots = slots[parents]
        if self._slots_above:
            for index in (parents == NO_NODE).nonzero()[0].tolist():
                parent_slots[index] = self._slots_above.get(int(nodes[index]), 0)
        tokens, positions = forest.tokens[nodes], forest.positions[nodes]
        if self._offset:
            positions = positions - self._offset
        source = view.prefix.source

        def forward_at(first_row: int) -> Forward:
            mask = view.append(parent_slots, first_row)
            rows = tokens, positions, mask, np.arange(size)
            return Forward(*rows, *features, source=source, is_ordered=True)

        return EngineCall(self._role, self.meter, size, forward_at, source)

    def _error(self, error: ModelError) -> ModelError:
        return ModelError(f"call {self._num_calls} of the {self._role}: {error}")

    def read_left_out(self, beams: Beams, threshold: float, most: int) -> LeftOut:
        """Look for continuations that an engine with a top-k head did not return.

        Of every beam that may have one with a log-weight of at least ``threshold``, the ``most``
        best are read. If they are GONE, the beam counts as not computed; what its parent sees
        remains known.
        """
        left_out, distributions = self.distributions.left_out, self.distributions.known
        slots, weights = self.slots[beams.nodes], beams.log_weights
        left = left_out.read(distributions, slots, weights, threshold, most)
        if left is LeftOut.GONE:
            nodes = beams.nodes[left_out.gone]
            slots = self.slots[nodes]
            self._slots_above |= dict(zip(nodes.tolist(), slots.tolist(), strict=True))
            self._view.forget_own_rows(slots)
            self.slots[nodes] = NOT_COMPUTED
        return left

    def keep_needed(self, is_kept: NDArray[np.bool_]) -> None:
        """Keep what is needed to compute kept nodes later: (num_nodes + 1,), the last is none."""
        forest = self.forest
        slots = forest.slots[self._engine]
        for features in self._features:
            slots = features.slots_after_pruning(slots)
        pending = forest.pending(is_kept[:-1].nonzero()[0], slots)
        is_kept[pending] = True
        is_kept[forest.parents[pending]] = True

    def prune(self) -> None:
        """Forget the nodes that the forest has dropped, and those whose rows are outdated."""
        slots = self.forest.slots[self._engine][: len(self.forest)]
        for features in self._features:
            slots[:] = features.slots_after_pruning(slots)
        computed = (slots > 0).nonzero()[0]
        kept = slots[computed]
        self._slots_above = {}
        self.distributions.keep(kept)
        if not kept.size:  # all beams have ended: ``finish`` looks at the rows as they were
            return
        self._view.keep(kept)
        for features in self._features:
            features.keep(kept)
        slots[computed] = np.arange(1, 1 + kept.size)


_LONG_REST = 8
"""From this many iterations without a draft, recomputing the draft's rows is cheaper than keeping
them up to date."""


class LateRunner(ForestRunner):
    """The draft's rows of the forest; it reads the end of the prompt just before its first node.

    During a long rest it is *put off*: nothing is kept for it, and its next rows are computed as a
    prompt is, all at once.

    context: where the draft's path begins.
    """

    def __init__(
        self,
        view: CacheView,
        forest: Forest,
        distributions: ComputedDistributions,
        prompt_ids: Sequence[int],
        hypotheses: Hypotheses,
        context: DraftContext,
    ) -> None:
        super().__init__("draft", view, forest, distributions)
        self._prompt_ids = prompt_ids
        self._hypotheses, self.context = hypotheses, context
        self._is_put_off = False
        self._first = self._newest = 0  # positions of what a draft continues, see ``can_draft``
        self.prefill_later(Beams.initial())

    def prefill_later(self, beams: Beams) -> None:
        """Compute the tokens of the only beam, except the last, just before its node."""
        (node,) = beams.nodes.tolist()
        forest = self.forest
        self._is_unread = True
        self._read_to = beams
        self.slots[forest.parents[node]] = 0  # what it sees is that prompt
        tokens = self._tokens()[:-1]

        def num_cached(start: int) -> int:
            identity = RowIdentity(self.context.tokens(tokens, start), self._view.prefix.source)
            return len(self._longest_prefix(identity).tokens)

        self._num_unread = self.context.choose(len(tokens), num_cached)

    def _longest_prefix(self, identity: RowIdentity) -> PrefixCache:
        """Return the rows that the path has: its own, unless another request has more."""
        prefix, shared = self._view.prefix, self._view.row_cache.longest_prefix(identity)
        num_own = prefix.identity.num_common(identity)
        return shared if len(shared.tokens) > num_own else prefix.copy_of(num_own)

    def rest(self, num_iterations: int, beams: Beams) -> None:
        """Be put off if that costs less than to stay up to date in iterations without a draft.

        With 0 iterations, be ready for a draft below these beams.
        """
        if not num_iterations:
            if self._is_put_off:
                self.prefill_later(beams)
        elif not self._is_put_off and (num_iterations >= _LONG_REST or self._is_unread):
            self._put_off(beams)

    def _put_off(self, beams: Beams) -> None:
        """Keep only the rows of the one path for a next call."""
        self._is_put_off = True
        if self._is_unread:
            return
        slots = self.slots[: len(self.forest)]
        computed = (slots > 0).nonzero()[0]
        self._view.keep(slots[computed])
        self._is_unread, self._read_to = True, beams
        self._view.end(self.context.tokens(self._tokens()))
        slots[computed] = NOT_COMPUTED
        self._slots_above = {}
        self.distributions.forget()

    def keep_needed(self, is_kept: NDArray[np.bool_]) -> None:
        if not self._is_put_off:
            super().keep_needed(is_kept)

    def prune(self) -> None:
        if not self._is_put_off:
            super().prune()

    def unread(self) -> tuple[int, int]:
        """Return how many tokens of prompt and source are read before the first node."""
        prefix, num_source = self._view.prefix, 0
        if self._view.spec.reads_source and not self._num_calls:
            num_source = len(prefix.source) if isinstance(prefix.source, tuple) else 0
        return self._num_unread if self._is_unread else 0, num_source

    def can_draft(self, beams: Beams) -> bool:
        """Return whether the draft has positions for layers below these beams."""
        positions = self.forest.positions
        self._newest = int(positions[beams.nodes].max())
        if self.context.reaches(self._newest):  # usually
            return True
        first = positions[self.pending(beams.nodes)].min(initial=self._newest)
        self._first = int(first)
        return self.context.can_reach(self._first, self._newest)

    def compute(self, pending: Nodes) -> EngineCalls[None]:
        """See ForestRunner; before, read what is unread, or begin the path again."""
        if not len(pending):
            return
        if self._is_unread:
            yield from self._read_prompt()
        if not self.context.reaches(self._newest):
            moved = self.context.begin_again(self._first, self._newest)
            self._start_here()
            again = self._view.begin_again(moved, self.context.num_begin)
            if again is not None:
                yield again
        yield from super().compute(pending)

    def _start_here(self) -> None:
        self._offset, prefix = self.context.offset, self._view.prefix
        prefix.start, prefix.num_begin = self.context.start, self.context.num_begin

    def _tokens(self) -> list[int]:
        """Return the prompt and the new tokens of the only beam that are read."""
        (path,) = self._hypotheses.paths(self._read_to.hypotheses)
        return [*self._prompt_ids, *self._hypotheses.tokens[path].tolist()]

    def finish(self, agreed_tokens: list[int]) -> None:
        """See ForestRunner.finish; rows of an earlier prompt that began alike stay as they are."""
        if not self._is_unread:
            super().finish(self.context.tokens(agreed_tokens))

    def _read_prompt(self) -> EngineCalls[None]:
        """Compute what is unread; rows that another request has by now are shared."""
        view, token_ids = self._view, self.context.tokens(self._tokens()[:-1])
        self._is_unread = self._is_put_off = False
        identity = RowIdentity(token_ids, view.prefix.source)
        longest = self._longest_prefix(identity)
        view.prefix.begin(identity)
        if len(longest.tokens) > len(view.prefix.tokens):
            view.prefix = longest
        self._start_here()
        yield from self.prefill(np.array(token_ids, dtype=np.int64))
