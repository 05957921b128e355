"""Features: hidden states of an engine's rows that a feature draft reads.

A feature belongs to a node: the target's, hidden states of its row, or the draft's own, the hidden
state of the draft's row. A feature draft computes a node from its token and the feature of its
parent. Only the engines know what a feature holds, and where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ZEROS = -1
"""In the place of a forward: the node has no parent, and its row is computed from zeros."""


class Features(Protocol):
    """The features of rows of one forward, which stay where the engine put them while held."""

    @property
    def role(self) -> Any:
        """The engine that computed them: "target" or "draft"."""

    def __len__(self) -> int:
        """Rows."""

    def copied(self, row: int) -> Features:
        """Return one of them in memory of its own, so that the others need not be held."""


@dataclass(frozen=True, slots=True)
class ParentFeatures:
    """For each of S rows, where the feature of its node's parent lies.

    Attributes:
        forwards: the features of earlier forwards, of target and draft.
        sources: (S,) int64. Index among ``forwards``, or ``ZEROS``.
        rows: (S,) int64. Row of these features.
    """

    forwards: tuple[Features, ...]
    sources: NDArray[np.int64]
    rows: NDArray[np.int64]

    def part(self, start: int, stop: int) -> ParentFeatures:
        """Return those of the rows ``start`` to ``stop - 1``."""
        return ParentFeatures(self.forwards, self.sources[start:stop], self.rows[start:stop])


def joined_parents(parts: Sequence[ParentFeatures]) -> ParentFeatures:
    """Return the parents' features of the rows of several forwards, one after the other."""
    if len(parts) == 1:
        return parts[0]
    forwards: dict[int, Features] = {}  # by id: requests share forwards
    sources = []
    for part in parts:
        forwards |= {id(features): features for features in part.forwards}
        numbers = {key: number for number, key in enumerate(forwards)}
        numbered = [numbers[id(features)] for features in part.forwards]
        sources.append(np.array([*numbered, ZEROS])[part.sources])  # ZEROS finds the last
    rows = np.concatenate([part.rows for part in parts])
    return ParentFeatures(tuple(forwards.values()), np.concatenate(sources), rows)
