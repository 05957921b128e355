"""Features: hidden states of an engine's rows that a feature draft reads.

Each node has a feature. It consists of hidden states of the target's row or, if the target has not
computed the node, of the hidden state of the draft's own row. A feature draft computes a node from
its token and the feature of its parent. Content and memory of a feature are private to the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ZEROS = -1
"""In ``ParentFeatures.sources``: the node has no parent, and its row is computed from zeros."""


class Features(Protocol):
    """The features of one forward's rows; they stay in the engine's memory while referenced."""

    @property
    def role(self) -> Any:
        """The engine that computed them: "target" or "draft"."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def copied(self, row: int) -> Features:
        """Return a copy of one row's features, so that the others can be freed."""


@dataclass(frozen=True, slots=True)
class ParentFeatures:
    """For each of S rows, the place of the feature of its node's parent."""

    forwards: tuple[Features, ...]  # earlier ones, of target and draft
    sources: NDArray[np.int64]  # (S,). Index in ``forwards``, or ``ZEROS``
    rows: NDArray[np.int64]  # (S,). Row in that forward's features

    def part(self, start: int, stop: int) -> ParentFeatures:
        return ParentFeatures(self.forwards, self.sources[start:stop], self.rows[start:stop])


def joined_parents(parts: Sequence[ParentFeatures]) -> ParentFeatures:
    """Return the parent features of the concatenated rows of several forwards."""
    if len(parts) == 1:
        return parts[0]
    forwards: dict[int, Features] = {}  # by id: requests share forwards
    sources = []
    for part in parts:
        forwards |= {id(features): features for features in part.forwards}
        numbers = {key: number for number, key in enumerate(forwards)}
        numbered = [numbers[id(features)] for features in part.forwards]
        sources.append(np.array([*numbered, ZEROS])[part.sources])  # index -1 is the last
    rows = np.concatenate([part.rows for part in parts])
    return ParentFeatures(tuple(forwards.values()), np.concatenate(sources), rows)
