"""States of the path of every forest node, beyond its last token.

The forest keeps these in step with its nodes. Only those that a request needs are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.distribution import larger
from dsbd_ort.decoding.logits_processing.constraint import Constraint, States

Nodes = NDArray[np.int64]
Tokens = NDArray[np.int64]


class PathStates(Protocol):
    """One kind of state, of every node of the forest."""

    def add(self, parents: Nodes, tokens: Tokens) -> NDArray[np.bool_] | None:
        """Add the states of new nodes; return which paths end there: (num_new,), None for none."""

    def would_end(self, parents: Nodes, tokens: Tokens) -> NDArray[np.bool_] | None:
        """Return the same for nodes that are not added."""

    def prune(self, kept: Nodes, is_absorbing: NDArray[np.int64]) -> None:
        """Keep the states of these nodes, which become 0, 1, ...

        kept: (num_kept,) int64 increasing. is_absorbing: (num_kept,) int64, 0 or 1. Theirs.
        """


class StopState(Protocol):
    """Whether the new tokens of one path end it: the seam for stop strings.

    Immutable: every node has its own, made from its parent's. A path that has ended is absorbing.
    """

    @property
    def has_ended(self) -> bool:
        """Whether the path has ended, with its last token or before."""

    def extended(self, token: int) -> StopState:
        """Return the state of the path with one more token."""


class StopStates:
    """PathStates: a StopState of every node; it sees tokens after the first ``num_exempt``."""

    def __init__(self, start: StopState, num_exempt: int) -> None:
        self._states = [start]
        self._exempt = [num_exempt]  # new tokens that are still exempt after each node

    def add(self, parents: Nodes, tokens: Tokens) -> NDArray[np.bool_]:
        states = self._extended(parents, tokens)
        self._states += states
        self._exempt += [max(self._exempt[parent] - 1, 0) for parent in parents.tolist()]
        return _ended(states)

    def would_end(self, parents: Nodes, tokens: Tokens) -> NDArray[np.bool_]:
        """See PathStates.would_end."""
        return _ended(self._extended(parents, tokens))

    def prune(self, kept: Nodes, is_absorbing: NDArray[np.int64]) -> None:
        numbers = kept.tolist()
        self._states = [self._states[old] for old in numbers]
        self._exempt = [self._exempt[old] for old in numbers]

    def _extended(self, parents: Nodes, tokens: Tokens) -> list[StopState]:
        return [
            self._states[parent] if self._exempt[parent] else self._states[parent].extended(token)
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]


def _ended(states: list[StopState]) -> NDArray[np.bool_]:
    return np.array([state.has_ended for state in states], dtype=np.bool_)


class ConstraintStates:
    """PathStates: the state of a constraint at every node.

    Attributes:
        constraint: it.
        eos: (num_eos,) int64. The end-of-sequence ids, increasing.
        states: (num_nodes,) of the constraint's dtype. Of a node with such a token: its parent's.
    """

    def __init__(self, constraint: Constraint, prompt_ids: Sequence[int], eos: Tokens) -> None:
        self.constraint = constraint
        self.eos = eos
        self.states: States = constraint.start(prompt_ids)

    def add(self, parents: Nodes, tokens: Tokens) -> NDArray[np.bool_]:
        states = self._advanced(parents, tokens)
        self.states = np.concatenate([self.states, states])
        return self.constraint.has_ended(states)

    def would_end(self, parents: Nodes, tokens: Tokens) -> NDArray[np.bool_]:
        """See PathStates.would_end."""
        return self.constraint.has_ended(self._advanced(parents, tokens))

    def prune(self, kept: Nodes, is_absorbing: NDArray[np.int64]) -> None:
        self.states = self.states[kept]

    def _advanced(self, parents: Nodes, tokens: Tokens) -> States:
        states = self.states[parents]
        goes_on = ~np.isin(tokens, self.eos)
        states[goes_on] = self.constraint.advance(states[goes_on], tokens[goes_on])
        return states


class PathTokens:
    """PathStates: the tokens of every path, for processors: shared ones once, the rest by node.

    The live paths share the prompt and the new tokens on which they agree; a path's *own* tokens
    are the few after them. With the prompt [7, 3] and the paths [7, 3, 5, 8] and [7, 3, 5, 9] of
    two nodes: shared [7, 3, 5], own [[8], [9]].

    Attributes:
        num_prompt: tokens of the prompt.
        prompt_counts, shared_counts: (vocab_size,) int64. How often each token is in the prompt,
            and among the shared new tokens.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self.num_prompt = len(prompt_ids)
        self._shared = np.array(prompt_ids, dtype=np.int64)
        self._num_shared = len(prompt_ids)
        self.prompt_counts = np.bincount(self._shared, minlength=vocab_size)
        self.shared_counts = np.zeros(vocab_size, dtype=np.int64)
        self._own = np.zeros((1, 8), dtype=np.int64)  # (num_nodes, room), padded with 0
        self._num_own = np.zeros(1, dtype=np.int64)

    @property
    def shared(self) -> Tokens:
        """The prompt and the new tokens that all live paths begin with, (num_shared,) int64."""
        return self._shared[: self._num_shared]

    def own(self, nodes: Nodes) -> tuple[NDArray[np.int64], Tokens]:
        """Return the own tokens of paths: the index of each token's path, and the tokens, flat."""
        width = int(self._num_own[nodes].max(initial=0))
        is_own = np.arange(width) < self._num_own[nodes, None]  # (num_paths, width)
        return is_own.nonzero()[0], self._own[nodes, :width][is_own]

    def num_new(self, nodes: Nodes) -> NDArray[np.int64]:
        """Return how many tokens of each path are new, (num_paths,) int64."""
        return self._num_shared - self.num_prompt + self._num_own[nodes]

    def path(self, node: int) -> Tokens:
        """Return the prompt and the new tokens of one path, (num_tokens,) int64."""
        return np.append(self.shared, self._own[node, : self._num_own[node]])

    def tail(self, nodes: Nodes, length: int) -> Tokens:
        """Return the last tokens of each path, (num_paths, length) int64; -1 before the first."""
        ends = self._num_own[nodes, None]
        places = ends - length + np.arange(length)  # in the own tokens; negative: shared
        tail = self._own[nodes[:, None], np.maximum(places, 0)]
        in_shared = self._num_shared + places
        shared = self._shared.take(in_shared, mode="clip")
        shared = np.where(in_shared >= 0, shared, -1)
        return np.where(places >= 0, tail, shared)

    def add(self, parents: Nodes, tokens: Tokens) -> None:
        """See PathStates.add; no path ends by its tokens alone."""
        ends, num_nodes = self._num_own[parents], len(self._num_own)
        if ends.max(initial=0) == self._own.shape[1]:
            self._own = np.concatenate([self._own, np.zeros_like(self._own)], axis=1)
        added = self._own[parents]
        added[np.arange(len(parents)), ends] = tokens
        self._own = np.concatenate([self._own[:num_nodes], added])
        self._num_own = np.append(self._num_own, ends + 1)

    def would_end(self, parents: Nodes, tokens: Tokens) -> None:
        """See PathStates.would_end."""

    def prune(self, kept: Nodes, is_absorbing: NDArray[np.int64]) -> None:
        """See PathStates.prune; tokens on which the live paths now agree become shared."""
        self._own, self._num_own = self._own[kept], self._num_own[kept]
        live = (is_absorbing == 0).nonzero()[0]
        if not len(live):
            return
        begins = self._own[live, : int(self._num_own[live].min())]
        differs = (begins != begins[0]).any(axis=0)
        num_agreed = int(differs.argmax()) if differs.any() else begins.shape[1]
        if num_agreed:
            tokens, size = begins[0, :num_agreed].copy(), self._num_shared + num_agreed
            if size > len(self._shared):
                self._shared = larger(self._shared, 2 * size)
            self._shared[self._num_shared : size] = tokens
            self._num_shared = size
            np.add.at(self.shared_counts, tokens, 1)
            self._own[:, :-num_agreed] = self._own[:, num_agreed:].copy()
            self._num_own = np.maximum(self._num_own - num_agreed, 0)
