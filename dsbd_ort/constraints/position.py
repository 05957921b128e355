"""Positions in a forest: paths that share their common beginning (grammars, functions)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_ort.decoding.logits_processing.constraint import States


class Position:
    """End of a path; it stores nothing else, as it lives as long as any path through it."""

    __slots__ = ("depth", "parent", "token")

    def __init__(self, parent: Position | None, token: int) -> None:
        """Create a position one token after ``parent``; None: the beginning, without a token."""
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1

    def tokens(self) -> list[int]:
        found = []
        position = self
        while position.parent is not None:
            found.append(position.token)
            position = position.parent
        return found[::-1]


def object_states(states: Sequence[object]) -> States:
    """Return an array of objects, (n,)."""
    array = np.empty(len(states), dtype=np.object_)
    array[:] = states
    return array
