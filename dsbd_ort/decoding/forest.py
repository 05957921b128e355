"""The forest: one trie of the drafted and accepted nodes below the prompt, each node once.

Beams of a request share the prompt, so their trees hang in one trie, and equal (path, token) pairs
are one node. The forest holds only what can still matter: the current beams, their descendants,
and ancestors that an engine has yet to compute. What lies above is committed; it lives on as rows
in the caches and as the beams' hypotheses.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.joint_distribution import STAY, JointDistribution
from dsbd_ort.decoding.noise import child_key, child_keys, root_key

NO_NODE = -1


class StopState(Protocol):
    """Whether the new tokens of one path end it: the seam for stop strings.

    Immutable: every node of the forest has its own, made from its parent's. A path that has ended
    is absorbing, as one whose last token ends the sequence.
    """

    @property
    def has_ended(self) -> bool:
        """Whether the path has ended, with its last token or before."""

    def extended(self, token: int) -> StopState:
        """Return the state of the path with one more token."""


def state_after(start: StopState, token_ids: Iterable[int]) -> StopState:
    """Return the state of the path of ``token_ids``."""
    return reduce(lambda state, token: state.extended(token), token_ids, start)


class Forest:
    """The nodes by number, parents before children.

    Attributes:
        tokens, parents, positions: per node. The parent of an oldest node is ``NO_NODE``.
        path_keys: per node, uint64 as int; chained from the root's, see ``noise``.
        drafted: the nodes that the draft proposed and that are not committed.
        absorbing: the nodes with which a sequence ends: they never cost a row.
        stop_states: per node, its StopState; empty where only tokens end a sequence.
    """

    def __init__(
        self,
        last_prompt_token: int,
        position: int,
        seed: int,
        eos_ids: frozenset[int],
        stop: StopState | None = None,
    ):
        """Start with one node, the last token of the prompt."""
        self.tokens = [last_prompt_token]
        self.parents = [NO_NODE]
        self.positions = [position]
        self.path_keys = [root_key(seed)]
        self.drafted: set[int] = set()
        self._num_proposed = 0
        self.absorbing: set[int] = set()
        self.stop_states = [stop] if stop else []
        self._eos_ids = eos_ids
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def candidate_keys(self, joint: JointDistribution) -> NDArray[np.uint64]:
        """Return the path keys of all candidates, (num_candidates,) uint64."""
        keys = np.array([self.path_keys[node] for node in joint.nodes], dtype=np.uint64)
        return child_keys(keys[joint.parents], joint.tokens)

    def descend(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> list[int]:
        """Return the node of every chosen candidate, made where it is not there yet.

        An absorbing beam stays the node it is.
        """
        nodes = []
        for parent, token in zip(joint.parents[chosen].tolist(), joint.tokens[chosen].tolist()):  # noqa: B905
            beam = joint.nodes[parent]
            nodes.append(beam if token == STAY else self._child(beam, token))
        return nodes

    def _child(self, parent: int, token: int) -> int:
        child = self._children.get((parent, token))
        if child is None:
            child = self._children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.positions.append(self.positions[parent] + 1)
            self.path_keys.append(child_key(self.path_keys[parent], token))
            if token in self._eos_ids:
                self.absorbing.add(child)
            if self.stop_states:
                state = self.stop_states[parent].extended(token)
                self.stop_states.append(state)
                if state.has_ended:
                    self.absorbing.add(child)
        return child

    def stopped(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which chosen candidates would end by their stop state: (num_chosen,) bool."""
        pairs = zip(joint.parents[chosen].tolist(), joint.tokens[chosen].tolist(), strict=True)
        states = [self.stop_states[joint.nodes[parent]].extended(token) for parent, token in pairs]
        return np.array([state.has_ended for state in states], dtype=np.bool_)

    def propose(self, joint: JointDistribution, chosen: NDArray[np.int64]) -> list[int]:
        """Return the nodes of the draft's chosen candidates, as ``descend``, noted as drafted."""
        nodes = self.descend(joint, chosen)
        num_before = len(self.drafted)
        self.drafted.update(set(nodes).difference(joint.nodes))
        self._num_proposed += len(self.drafted) - num_before
        return nodes

    def num_proposed(self) -> int:
        """Return how many nodes were drafted since the last call."""
        number, self._num_proposed = self._num_proposed, 0
        return number

    def commit(self, nodes: Iterable[int]) -> int:
        """Take the selected nodes of a layer out of ``drafted``; return how many were."""
        accepted = self.drafted.intersection(nodes)
        self.drafted -= accepted
        return len(accepted)

    def descendants(self, roots: Iterable[int]) -> list[int]:
        """Return the nodes below ``roots``, parents before children."""
        found, below = set(roots), []
        for node, parent in enumerate(self.parents):
            if parent in found:
                found.add(node)
                below.append(node)
        return below

    def prune(self, kept: list[int]) -> dict[int, int]:
        """Keep the nodes ``kept`` (increasing), renumbered from 0; return new number by old."""
        renumbered = {old: new for new, old in enumerate(kept)}
        self.parents = [renumbered.get(self.parents[old], NO_NODE) for old in kept]
        self.tokens = [self.tokens[old] for old in kept]
        self.positions = [self.positions[old] for old in kept]
        self.path_keys = [self.path_keys[old] for old in kept]
        self.drafted = {renumbered[old] for old in self.drafted if old in renumbered}
        self.absorbing = {renumbered[old] for old in self.absorbing if old in renumbered}
        if self.stop_states:
            self.stop_states = [self.stop_states[old] for old in kept]
        self._children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
            if parent != NO_NODE
        }
        return renumbered
