"""Features in memory: their place between calls, and the features that a call reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ParentFeatures
from dsbd_forward.rows import Ints
from dsbd_runtime.parts.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.part import HostBinder

FEATURE_ROWS = "feature_rows"
FEATURES = "features"
TARGET_FEATURES = "target_features"
OWN_FEATURES = "own_features"
FEATURE_INDEX = "feature_index"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of the features of one forward: ``features[rows]``."""

    features: Any
    rows: Ints


@dataclass(frozen=True, slots=True)
class ReadFeatures:
    """The features that the S rows of a call of a feature draft come from.

    Attributes:
        target, own: the rows that the call reads of either engine's features, in their order.
        index: (S,) int64. Of each row, which of them all, those of the target first; -1: zeros.
    """

    target: list[Piece]
    own: list[Piece]
    index: Ints

    @classmethod
    def of(cls, parents: ParentFeatures) -> ReadFeatures:
        """Sort the parents' features by the engine that computed them.

        With forwards of target, draft and target, the sources [2, 1, 2, -1] give the index
        [0, 2, 1, -1].
        """
        index = np.full(len(parents.sources), -1)
        found = []
        for number in np.unique(parents.sources).tolist():
            if number < 0:
                continue
            features, at = parents.forwards[number], (parents.sources == number).nonzero()[0]
            found.append((features.role != "target", Piece(features, parents.rows[at]), at))
        found.sort(key=lambda each: each[0])
        first = 0
        for _, _, at in found:
            index[at] = np.arange(first, first + len(at))
            first += len(at)
        target = [piece for is_own, piece, _ in found if not is_own]
        return cls(target, [piece for is_own, piece, _ in found if is_own], index)

    @property
    def num_target(self) -> int:
        """F, the rows that are read of the target's features."""
        return sum(len(piece.rows) for piece in self.target)

    @property
    def num_own(self) -> int:
        """P, the rows that are read of the draft's own."""
        return sum(len(piece.rows) for piece in self.own)


@dataclass(frozen=True, slots=True)
class HostFeatures:
    """Features in host memory: the array (n, width) that the engine has written."""

    role: str
    array: NDArray[Any]

    def __len__(self) -> int:
        return len(self.array)

    def copied(self, row: int) -> HostFeatures:
        return HostFeatures(self.role, self.array[row : row + 1].copy())


class HostFeatureMemory:
    """Features in host memory, each forward's in an array of its own."""

    kind = HostFeatures  # a call can read no others

    def __init__(self, role: str, widths: Mapping[str, int], dtype: str) -> None:
        self._role = role
        self._widths = widths
        self._dtype = NUMPY_DTYPES[dtype]

    def take(self, num_rows: int) -> HostFeatures:
        """Return room for the features of so many rows."""
        return HostFeatures(self._role, np.empty((num_rows, self._widths[FEATURES]), self._dtype))

    def bind_returned(
        self, binder: HostBinder, kept: HostFeatures, first: int, number: int, dim: str
    ) -> None:
        """Let the next call write ``number`` features to ``kept``, from row ``first`` on.

        dim: name of their dimension in the call.
        """
        binder.write_to(FEATURES, kept.array[first : first + number])

    def bind_read(self, binder: HostBinder, read: ReadFeatures) -> None:
        """Let the next call read the features of its rows' parents."""
        pieces = {TARGET_FEATURES: read.target, OWN_FEATURES: read.own}
        rows = {
            name: host_rows(found, self._widths[name], self._dtype)
            for name, found in pieces.items()
        }
        binder.write({**rows, FEATURE_INDEX: read.index})

    def close(self) -> None:
        """Do nothing: arrays last as long as they are held."""


def host_rows(pieces: list[Piece], width: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the rows of all pieces as one array, without a copy where they lie so."""
    if len(pieces) == 1:
        (piece,) = pieces
        first = int(piece.rows[0])
        if np.array_equal(piece.rows, np.arange(first, first + len(piece.rows))):
            rows: NDArray[Any] = piece.features.array[first : first + len(piece.rows)]
            return rows
    parts = [piece.features.array[piece.rows] for piece in pieces]
    return np.concatenate([np.empty((0, width), dtype), *parts])
