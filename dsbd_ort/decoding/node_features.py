"""Features of a request's nodes: which a feature draft reads, and where they lie.

The row of a node comes from the feature of its parent: the target's if the target has computed the
parent, else the draft's own, until the target has verified the forest. Then the row is *outdated*,
and computed again once it is needed: the only case in which an engine computes a live node twice.

    the prompt is a b; c and d are drafted below it, and e is selected below d

    row         a  b  c  d        a  b  c  d  e
    comes from  0  Fa Fb Oc       .  .  .  Fc Fd      0: zeros, F: the target's, O: own

Left: the first draft. Right: the second one; the rows marked by a point stay as they are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ZEROS, Features, ParentFeatures
from dsbd_forward.forward import ForwardResult
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.distribution import larger
from dsbd_ort.decoding.forest import NOT_COMPUTED, Forest, Nodes
from dsbd_ort.decoding.kv_cache import PrefixCache, PromptFeature

Ints = NDArray[np.int64]


def align_prefixes(target: PrefixCache, draft: PrefixCache) -> None:
    """Shorten what the target reuses if the draft needs features that were not kept.

    The row of the draft at position i comes from the target's feature of position i - 1. With 7
    rows reused by the target and 5 by the draft, the target computes from position 4 on again. The
    draft reuses one row more than the target at most: others could not be computed again, after a
    preemption, before the target's.
    """
    draft.shorten(len(target.tokens) + 1)
    num_target, num_draft = len(target.tokens), len(draft.tokens)
    is_kept = target.feature is not None and target.feature.num_tokens == num_target == num_draft
    if num_draft <= num_target and not is_kept:
        target.shorten(max(num_draft - 1, 0))


class FeatureNeeds(NamedTuple):
    """Features that a forward returns and reads, see ``Forward``."""

    feature_rows: Ints | None
    parent_features: ParentFeatures | None


NO_FEATURES = FeatureNeeds(None, None)


class FeatureTable:
    """Where the features of an engine's computed nodes lie, by slot of its ``ForestRunner``.

    Slot 0 is that of the prompt's last token but one, the parent of the forest's root.
    """

    def __init__(self) -> None:
        self._forwards: list[Features] = []
        self._places = np.full((2, 64), ZEROS)  # index of the forward, row there
        self._num_slots = 1

    def set_first(self, feature: Features) -> None:
        """Let slot 0 have this feature, the only row of its ``Features``."""
        assert self._num_slots == 1  # the prompt comes before all nodes
        self._forwards, self._places[:, 0] = [feature], 0

    def append(self, result: ForwardResult, num_rows: int) -> None:
        """Add the features that a call has returned, of the next slots."""
        assert result.features is not None  # the call has asked for them
        first, end = self._num_slots, self._num_slots + num_rows
        if end > self._places.shape[1]:
            self._places = larger(self._places.T, 2 * end).T
        self._places[0, first:end] = len(self._forwards)
        self._places[1, first:end] = np.arange(num_rows) + result.first_feature
        self._forwards.append(result.features)
        self._num_slots = end

    def keep(self, slots: Ints) -> None:
        """Keep slot 0 and these, which become 1, 2, ...; let go of the forwards of all others."""
        num_slots = 1 + len(slots)
        self._places[:, 1:num_slots] = self._places[:, slots]
        self._num_slots = num_slots
        sources = self._places[0, :num_slots]
        used = np.unique(sources[sources != ZEROS])
        self._places[0, :num_slots] = np.where(sources == ZEROS, ZEROS, used.searchsorted(sources))
        self._forwards = [self._forwards[number] for number in used.tolist()]

    def places(self, slots: Ints) -> tuple[tuple[Features, ...], Ints, Ints]:
        """Return all forwards, and of each slot which of them and which row it is."""
        return tuple(self._forwards), self._places[0, slots], self._places[1, slots]


class _Chunk(NamedTuple):
    """The features, and where they lie, of the part of the prompt that the target computed last."""

    start: int  # position of the first
    features: Features
    first_row: int
    before: Features | None  # the feature of position ``start`` - 1; None: not needed


class TargetFeatures:
    """The features that the target's calls return."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self.table = FeatureTable()
        self._chunk: _Chunk | None = None
        kept, num_tokens = view.prefix.feature, len(view.prefix.tokens)
        self._last: Features | None = None
        if kept is not None and kept.num_tokens == num_tokens:
            self._last = kept.feature
            self.table.set_first(kept.feature)

    def for_prompt(self, start: int, num_rows: int) -> FeatureNeeds:
        """Return what a forward of the prompt from position ``start`` on reads and returns."""
        return FeatureNeeds(np.arange(num_rows), None)

    def take_prompt(self, result: ForwardResult, start: int, num_rows: int) -> None:
        """Keep the features that such a forward has returned, until the next one."""
        features, first_row = result.features, result.first_feature
        assert features is not None  # the forward has asked for them
        self._chunk = _Chunk(start, features, first_row, self._last)
        self._last = features.copied(first_row + num_rows - 1)
        self.table.set_first(self._last)
        self._view.prefix.feature = PromptFeature(start + num_rows, self._last)

    def of_prompt(self, start: int, num_rows: int) -> ParentFeatures:
        """Return what the draft's rows of the prompt from position ``start`` on come from."""
        chunk = self._chunk
        assert chunk is not None  # the target goes first
        first_row = chunk.first_row - chunk.start
        rows = np.arange(start - 1, start + num_rows - 1) + first_row
        sources = np.zeros(num_rows, dtype=np.int64)
        forwards = [chunk.features]
        if start <= chunk.start:
            rows[0], sources[0] = 0, 1 if start else ZEROS
            if start:
                assert chunk.before is not None  # see align_prefixes
                forwards.append(chunk.before)
        return ParentFeatures(tuple(forwards), sources, rows)

    def ready(self, nodes: Nodes) -> Nodes:
        return nodes

    def for_nodes(self, nodes: Nodes) -> FeatureNeeds:
        """Return what a forward of nodes of the forest reads and returns."""
        self._chunk = None
        return FeatureNeeds(np.arange(len(nodes)), None)

    def take(self, result: ForwardResult, num_rows: int) -> None:
        self.table.append(result, num_rows)

    def slots_after_pruning(self, slots: Ints) -> Ints:
        """Return the slots, without those of nodes to be computed again: none."""
        return slots

    def keep(self, slots: Ints) -> None:
        self.table.keep(slots)


class DraftFeatures:
    """NodeFeatures of a feature draft: what the rows of nodes come from, and its own."""

    def __init__(self, forest: Forest, target: TargetFeatures) -> None:
        self._forest, self._target = forest, target
        self._table = FeatureTable()
        # By slot, that of the parent if the row comes from its own feature, else 0.
        self._own_parents = np.zeros(64, dtype=np.int64)
        self._num_slots = 1
        self._next_parents: Ints = np.arange(0)  # the same of the call that is made now

    def for_prompt(self, start: int, num_rows: int) -> FeatureNeeds:
        return FeatureNeeds(None, self._target.of_prompt(start, num_rows))

    def take_prompt(self, result: ForwardResult, start: int, num_rows: int) -> None:
        """See TargetFeatures; own features of the prompt are of no use."""

    def ready(self, nodes: Nodes) -> Nodes:
        """Return which of these nodes one call can compute: those whose parents have a feature."""
        parents = self._forest.parents[nodes]
        of_target, own = (slots[parents] for slots in self._forest.slots)
        ready: Nodes = nodes[(of_target >= 0) | (own > 0)]
        return ready

    def for_nodes(self, nodes: Nodes) -> FeatureNeeds:
        parents = self._forest.parents[nodes]
        of_target, own = (slots[parents] for slots in self._forest.slots)
        is_from_own = of_target < 0
        self._next_parents = np.where(is_from_own, own, 0)
        forwards, sources, rows = self._target.table.places(np.maximum(of_target, 0))
        if len(is_from_own.nonzero()[0]):
            own_forwards, own_sources, own_rows = self._table.places(own[is_from_own])
            sources[is_from_own] = own_sources + len(forwards)
            rows[is_from_own] = own_rows
            forwards += own_forwards
        return FeatureNeeds(None, ParentFeatures(forwards, sources, rows))

    def take(self, result: ForwardResult, num_rows: int) -> None:
        self._table.append(result, num_rows)
        first, end = self._num_slots, self._num_slots + num_rows
        if end > len(self._own_parents):
            self._own_parents = larger(self._own_parents, 2 * end)
        self._own_parents[first:end] = self._next_parents
        self._num_slots = end

    def slots_after_pruning(self, slots: Ints) -> Ints:
        """Return the slots, (n,) int64, without those of rows that come from own features."""
        return np.where(self._own_parents[np.maximum(slots, 0)] > 0, NOT_COMPUTED, slots)

    def own_of(self, slot: int) -> tuple[Features, int] | None:
        """Return the own feature that a slot's row comes from, None if it is the target's."""
        if not (parent := int(self._own_parents[slot])):
            return None
        forwards, source, row = self._table.places(np.array(parent))
        return forwards[int(source)], int(row)

    def keep(self, slots: Ints) -> None:
        self._table.keep(slots)
        self._num_slots = 1 + len(slots)
        self._own_parents[1 : self._num_slots] = 0  # what comes from own features is outdated


NodeFeatures = TargetFeatures | DraftFeatures
"""The features of a ``ForestRunner``."""
