"""The forest: one trie of the drafted and accepted nodes below the prompt, each node once.

Equal (path, token) pairs are one node. The forest holds only what can still matter: the current
beams, their descendants, and ancestors that an engine has yet to compute. What lies above is
committed; it lives on as rows in the caches and as the beams' hypotheses.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import NO_INTS
from dsbd_ort.decoding.joint_distribution import FEW_TOKENS, UPPER_HALF, JointDistribution
from dsbd_ort.decoding.logits_processing.path_states import PathStates
from dsbd_ort.decoding.noise import Keys, mix64, root_key

NO_NODE = -1
NOT_COMPUTED = -1

Nodes = NDArray[np.int64]


class Forest:
    """The nodes by number, parents before children, as columns of one array.

    The attributes have room for more nodes than there are; their last entry, which ``NO_NODE``
    finds, is that of no node: its slots are 0, the prompt's. Read them anew after nodes were added.

    tokens, parents, positions: (room,) int64. An oldest node's parent is ``NO_NODE``.
    path_keys: (room,) uint64. Chained from the root's, see ``noise``.
    is_absorbing: (room,) int64, 0 or 1. A sequence ends with the node: it costs no row.
    slots: by engine, (room,) int64. The node's place in its ``CacheView`` and distributions;
        ``NOT_COMPUTED``, or 0 for an absorbing node, which needs none.
    path_states: other state of the path of every node, kept in step.
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
        self._eos_ids = eos_ids
        self.path_states = path_states
        self.has_ends = False
        self.num_added = self.num_met = 0
        self._num_nodes = 0
        self._first_leaf = 0  # no node from here on has a child
        self._columns = _UNUSED
        self._reserve(32)
        self._num_nodes = 1
        self.tokens[0], self.positions[0] = last_prompt_token, position
        self.path_keys[0] = root_key(seed)

    def __len__(self) -> int:
        return self._num_nodes

    def candidate_keys(self, joint: JointDistribution) -> Keys:
        """Return the path keys of all candidates, (num_candidates,) uint64."""
        if joint.path_keys is None:
            keys = self.path_keys[joint.nodes]
            if joint.num_tokens > FEW_TOKENS:
                tokens = joint.tokens.reshape(-1, joint.num_tokens)
                joint.path_keys = mix64(keys[:, None], tokens).ravel()
            else:
                joint.path_keys = mix64(keys[joint.parents], joint.tokens)
        return joint.path_keys

    def descend(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> Nodes:
        """Return the node of every distinct chosen candidate; an absorbing beam's is its own."""
        num_chosen = len(chosen)
        if not num_chosen:
            return chosen
        parents, tokens = joint.nodes[joint.parents[chosen]], joint.tokens[chosen]
        if not self.has_ends and parents[parents.argmin()] >= self._first_leaf:
            return self._add(parents, tokens, joint, chosen)
        nodes = self._children(parents, tokens)
        if self.has_ends:
            stays = (tokens < 0).nonzero()[0]
            nodes[stays] = parents[stays]
            self.num_met -= len(stays)
        missing = (nodes < 0).nonzero()[0]
        self.num_met += num_chosen - len(missing)
        if len(missing):
            nodes[missing] = self._add(parents[missing], tokens[missing], joint, chosen[missing])
        return nodes

    def _children(self, parents: Nodes, tokens: NDArray[np.int64]) -> Nodes:
        wanted = (parents << UPPER_HALF) + tokens
        keys = (self.parents[: self._num_nodes] << UPPER_HALF) + self.tokens[: self._num_nodes]
        order = keys.argsort()
        children: Nodes = order.take(keys.searchsorted(wanted, sorter=order), mode="clip")
        children[keys[children] != wanted] = NO_NODE
        return children

    def _add(
        self,
        parents: Nodes,
        tokens: NDArray[np.int64],
        joint: JointDistribution,
        chosen: NDArray[np.int64],
    ) -> Nodes:
        num_new = len(tokens)
        first, last = self._num_nodes, self._num_nodes + num_new
        if last >= self._columns.shape[1]:
            self._reserve(last)
        if joint.path_keys is None:
            keys = mix64(self.path_keys[parents], tokens)
        else:
            keys = joint.path_keys[chosen]
        self.tokens[first:last], self.parents[first:last] = tokens, parents
        self.positions[first:last] = self.positions[parents] + 1
        self.path_keys[first:last] = keys
        self._num_nodes = last
        self.num_added += num_new
        self._first_leaf = first
        ends = NO_INTS
        if not self._eos_ids.isdisjoint(token_list := tokens.tolist()):
            ends = np.array([i for i, token in enumerate(token_list) if token in self._eos_ids])
        for states in self.path_states:
            if (stops := states.add(parents, tokens)) is not None:
                ends = np.append(ends, stops.nonzero()[0])
        if len(ends):
            self.has_ends = True
            self.is_absorbing[first + ends] = 1
            for slots in self.slots:
                slots[first + ends] = 0
        return np.arange(first, last)

    def _reserve(self, num_nodes: int) -> None:
        """Make room for ``num_nodes`` nodes, followed by the entry that stands for no node."""
        columns = np.repeat(_UNUSED, 2 * num_nodes, axis=1)
        columns[:, : self._num_nodes] = self._columns[:, : self._num_nodes]
        self.tokens, self.parents, self.positions, keys, self.is_absorbing = columns[:5]
        self.path_keys = keys.view(np.uint64)
        self.slots: tuple[Nodes, Nodes] = columns[5], columns[6]
        columns[5:, NO_NODE] = 0
        self._columns = columns

    def stopped(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which chosen candidates would end by the state of a path: (num_chosen,) bool."""
        parents, tokens = joint.nodes[joint.parents[chosen]], joint.tokens[chosen]
        ends = np.zeros(len(chosen), dtype=np.bool_)
        for states in self.path_states:
            if (stops := states.would_end(parents, tokens)) is not None:
                ends |= stops
        return ends

    def are_absorbing(self, nodes: Nodes) -> bool:
        return self.has_ends and bool(self.is_absorbing[nodes].all())

    @property
    def trunk_length(self) -> int:
        """How many of the first nodes are a chain from the root on, each the child of the last."""
        parents = self.parents[: self._num_nodes]
        breaks = (parents != np.arange(NO_NODE, NO_NODE + self._num_nodes)).nonzero()[0]
        return int(breaks[0]) if len(breaks) else self._num_nodes

    def pending(self, nodes: Nodes, slots: NDArray[np.int64]) -> Nodes:
        """Return what must be computed before the distributions after ``nodes``, parents first."""
        parents = self.parents
        pending = nodes[slots[nodes] < 0]
        above = parents[pending]
        above = above[slots[above] < 0]
        if not len(above):  # usually
            return pending
        is_pending = np.zeros(len(slots), dtype=np.bool_)
        is_pending[pending] = True
        trunk = self.trunk_length
        while len(above):
            is_pending[above] = True
            in_trunk = above[above < trunk]
            if len(in_trunk):  # a draft that rests has all tokens since it rests to compute
                for last in set(in_trunk.tolist()):
                    computed = (slots[: last + 1] >= 0).nonzero()[0]
                    is_pending[computed[-1] + 1 if len(computed) else 0 : last] = True
                above = above[above >= trunk]
            above = parents[above]
            above = above[slots[above] < 0]
        return is_pending.nonzero()[0]

    def below(self, roots: Nodes) -> NDArray[np.bool_]:
        """Return which nodes are descendants of ``roots``, these not included: (num_nodes,)."""
        is_below = np.zeros(self._num_nodes + 1, dtype=np.bool_)  # the last: NO_NODE, never one
        if not len(roots) or roots[roots.argmin()] >= self._first_leaf:
            return is_below[:-1]
        is_below[roots] = True
        parents = self.parents[: self._num_nodes]
        num_found, num_before = len(roots), 0
        while num_found > num_before:
            is_below[:-1] |= is_below[parents]
            num_found, num_before = len(is_below.nonzero()[0]), num_found
        is_below[roots] = False
        return is_below[:-1]

    def prune(self, is_kept: NDArray[np.bool_]) -> Nodes:
        """Drop the nodes that are not kept, (num_nodes,); return new number by old, or NO_NODE."""
        kept = is_kept.nonzero()[0]
        num_before, num_kept = self._num_nodes, len(kept)
        renumbered = np.empty(num_before + 1, np.int64)
        renumbered.fill(NO_NODE)  # the last is that of NO_NODE
        renumbered[kept] = np.arange(num_kept)
        self._columns[:, :num_kept] = self._columns.take(kept, axis=1)
        self._columns[:, num_kept:num_before] = _UNUSED
        self._num_nodes = num_kept
        for states in self.path_states:
            states.prune(kept, self.is_absorbing[:num_kept])
        parents = renumbered[self.parents[:num_kept]]
        self.parents[:num_kept] = parents
        self._first_leaf = 1 + int(parents[parents.argmax()]) if num_kept else 0
        return renumbered


_UNUSED = np.array([[0, NO_NODE, 0, 0, 0, NOT_COMPUTED, NOT_COMPUTED]]).T  # a column without node
