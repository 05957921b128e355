"""Positions in a forest, for grammars and functions: paths share their common beginning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_ort.decoding.logits_processing.constraint import States


class Position:
    """End of a path. It stores little, because it lives as long as any path through it."""

    __slots__ = ("depth", "parent", "token")

    def __init__(self, parent: Position | None, token: int) -> None:
        """Create a position one token after ``parent``. None: the beginning (token -1)."""
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1

    def tokens(self) -> list[int]:
        reversed_tokens = []
        position = self
        while position.parent is not None:
            reversed_tokens.append(position.token)
            position = position.parent
        return reversed_tokens[::-1]


def object_states(states: Sequence[object]) -> States:
    """Return an array of objects, (n,)."""
    array = np.empty(len(states), dtype=np.object_)
    array[:] = states
    return array
