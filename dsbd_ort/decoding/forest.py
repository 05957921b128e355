"""The forest: one trie of the drafted and accepted nodes below the prompt, each node once.

Beams of a request share the prompt, so their trees hang in one trie, and equal (path, token) pairs
are one node. The forest holds only what can still matter: the current beams, their descendants,
and ancestors that an engine has yet to compute. What lies above is committed; it lives on as rows
in the caches and as the beams' hypotheses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.joint_distribution import JointDistribution
from dsbd_ort.decoding.noise import Keys, child_keys, root_key
from dsbd_ort.decoding.path_states import PathStates

NO_NODE = -1
NOT_COMPUTED = -1

Nodes = NDArray[np.int64]


class Forest:
    """The nodes by number, parents before children, as columns of one array.

    Pruning is one gather of the kept columns. The attributes are views that end with the last node:
    read them anew after nodes were added or pruned.

    Attributes:
        tokens, parents, positions: (num_nodes,) int64. An oldest node's parent is ``NO_NODE``.
        path_keys: (num_nodes,) uint64. Chained from the root's, see ``noise``.
        is_absorbing: (num_nodes,) int64, 0 or 1. A sequence ends with the node: it costs no row.
        slots: (2, num_nodes) int64. By engine, the node's place in its ``CacheView`` and
            distributions; ``NOT_COMPUTED``, or 0 for an absorbing node, which needs none.
        path_states: what else is known of the path of every node, kept in step.
        has_ends: whether there is an absorbing node.
        num_added, num_met: nodes that ``descend`` has made, and found there, so far.
    """

    def __init__(
        self,
        last_prompt_token: int,
        position: int,
        seed: int,
        eos_ids: frozenset[int],
        path_states: Sequence[PathStates] = (),
    ):
        """Start with one node, the last token of the prompt."""
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)[:, None]
        self.path_states = path_states
        self.has_ends = False
        self.num_added = self.num_met = 0
        self._num_nodes = 0
        self._last_parent = NO_NODE  # highest number of a node with a child
        self._columns = np.empty((_NUM_FIELDS, 64), dtype=np.int64)
        self._show(1)
        self._columns[:, 0] = 0
        self.tokens[0], self.parents[0], self.positions[0] = last_prompt_token, NO_NODE, position
        self.path_keys[0] = root_key(seed)
        self.slots[:] = NOT_COMPUTED

    def __len__(self) -> int:
        return self._num_nodes

    def candidate_keys(self, joint: JointDistribution) -> Keys:
        """Return the path keys of all candidates, (num_candidates,) uint64."""
        if joint.path_keys is None:
            keys = self.path_keys[joint.nodes]
            if joint.num_tokens:
                tokens = joint.tokens.reshape(-1, joint.num_tokens)
                joint.path_keys = child_keys(keys[:, None], tokens).ravel()
            else:
                joint.path_keys = child_keys(keys[joint.parents], joint.tokens)
        return joint.path_keys

    def descend(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> Nodes:
        """Return the node of every distinct chosen candidate, made where it is not there yet.

        An absorbing beam stays the node it is.
        """
        parents, tokens = joint.nodes[joint.parents[chosen]], joint.tokens[chosen]
        if not self.has_ends and parents.min(initial=self._num_nodes) > self._last_parent:
            return self._add(parents, tokens, joint, chosen)  # no node among them has a child yet
        nodes = self._children(parents, tokens)
        if self.has_ends:
            stays = (tokens < 0).nonzero()[0]
            nodes[stays] = parents[stays]
            self.num_met -= len(stays)
        missing = (nodes < 0).nonzero()[0]
        self.num_met += len(nodes) - len(missing)
        nodes[missing] = self._add(parents[missing], tokens[missing], joint, chosen[missing])
        return nodes

    def _children(self, parents: Nodes, tokens: NDArray[np.int64]) -> Nodes:
        """Return the children that are there already, -1 where there is none."""
        nodes = np.full(len(tokens), NO_NODE)
        wanted = (parents << 32) + tokens
        known = (self.parents << 32) + self.tokens
        order = known.argsort()
        found = order.take(known.searchsorted(wanted, sorter=order), mode="clip")
        is_found = known[found] == wanted
        nodes[is_found] = found[is_found]
        return nodes

    def _add(
        self,
        parents: Nodes,
        tokens: NDArray[np.int64],
        joint: JointDistribution,
        chosen: NDArray[np.int64],
    ) -> Nodes:
        """Add a node for each of these candidates of ``joint``; return the new nodes."""
        first, last = self._num_nodes, self._num_nodes + len(tokens)
        if first == last:
            return chosen
        if joint.path_keys is None:
            keys = child_keys(self.path_keys[parents], tokens)
        else:
            keys = joint.path_keys[chosen]
        positions = self.positions[parents] + 1
        self._show(last)
        self.num_added += len(tokens)
        self._last_parent = max(self._last_parent, int(parents.max()))
        added = self._columns[:, first:last]
        added[0], added[1], added[2], added[3] = tokens, parents, positions, keys.view(np.int64)
        added[4] = 0
        added[5:] = NOT_COMPUTED
        ends = (tokens == self._eos_ids).nonzero()[1]
        for states in self.path_states:
            if (stops := states.add(parents, tokens)) is not None:
                ends = np.append(ends, stops.nonzero()[0])
        if len(ends):
            self.has_ends = True
            added[4, ends] = 1
            added[5:, ends] = 0
        return np.arange(first, last)

    def _show(self, num_nodes: int) -> None:
        """Let the attributes show ``num_nodes`` nodes, in a larger array where they do not fit."""
        if num_nodes > self._columns.shape[1]:
            larger = np.empty((_NUM_FIELDS, 2 * num_nodes), dtype=np.int64)
            larger[:, : self._num_nodes] = self._columns[:, : self._num_nodes]
            self._columns = larger
        self._num_nodes = num_nodes
        shown = self._columns[:, :num_nodes]
        self.tokens, self.parents, self.positions, keys, self.is_absorbing = shown[:5]
        self.path_keys, self.slots = keys.view(np.uint64), shown[5:]

    def stopped(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which chosen candidates would end by the state of their path: (num_chosen,) bool."""
        parents, tokens = joint.nodes[joint.parents[chosen]], joint.tokens[chosen]
        ends = np.zeros(len(chosen), dtype=np.bool_)
        for states in self.path_states:
            if (stops := states.would_end(parents, tokens)) is not None:
                ends |= stops
        return ends

    def told(self, nodes: Nodes) -> NDArray[np.int64]:
        """Return tokens, parents and positions of these nodes, (3, num_nodes) int64."""
        return self._columns[:3].take(nodes, axis=1)

    def are_absorbing(self, nodes: Nodes) -> bool:
        """Return whether a sequence ends with each of these nodes."""
        return self.has_ends and bool(self.is_absorbing[nodes].all())

    def below(self, roots: Nodes) -> NDArray[np.bool_]:
        """Return which nodes are descendants of ``roots``, these not included: (num_nodes,)."""
        is_below = np.zeros(self._num_nodes + 1, dtype=np.bool_)  # the last: NO_NODE, never one
        is_below[roots] = True
        num_found, num_before = len(roots), 0
        while num_found > num_before:
            is_below[:-1] |= is_below[self.parents]
            num_found, num_before = int(np.count_nonzero(is_below)), num_found
        is_below[roots] = False
        return is_below[:-1]

    def prune(self, is_kept: NDArray[np.bool_]) -> Nodes:
        """Drop the nodes that are not kept, (num_nodes,); return new number by old, or NO_NODE."""
        kept = is_kept.nonzero()[0]
        renumbered = np.full(self._num_nodes + 1, NO_NODE)  # the last is that of NO_NODE
        renumbered[kept] = np.arange(len(kept))
        self._columns[:, : len(kept)] = self._columns.take(kept, axis=1)
        self._show(len(kept))
        for states in self.path_states:
            states.prune(kept, self.is_absorbing)
        self.parents[:] = renumbered[self.parents]
        self._last_parent = int(self.parents.max(initial=NO_NODE))
        return renumbered


_NUM_FIELDS = 7
