"""Features of an engine's rows: hidden states that a feature draft's engine reads.

A target's engine returns them of the rows that a call names, a feature draft's engine of all rows
of a call, and reads those of the parents of its rows. They stay where the engine runs: in arrays on
the host, in device memory on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import ParentFeatures
from dsbd_runtime.errors import InputError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of the features of one forward: ``features[rows]``."""

    features: Any
    rows: Ints


@dataclass(frozen=True, slots=True)
class ReadFeatures:
    """The features that the S rows of a call of a feature draft come from.

    Attributes:
        target, own: the rows that the call reads of either, one behind the other.
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
    """Features in host memory: the array that the engine has written.

    Attributes:
        array: (n, width).
    """

    role: str
    array: NDArray[Any]

    def __len__(self) -> int:
        return len(self.array)

    def copied(self, row: int) -> HostFeatures:
        """See Features."""
        return HostFeatures(self.role, self.array[row : row + 1].copy())


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


def check_kept_rows(rows: Any, num_new: int) -> None:
    """Raise InputError unless these are increasing rows of a forward."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.ndim != 1:
        raise InputError(
            f"feature_rows is {rows!r:.60}, expected a numpy array of 1 dimension, int64"
        )
    is_wrong = (rows < 0) | (rows >= num_new)
    is_wrong[1:] |= rows[1:] <= rows[:-1]
    if is_wrong.any():
        index = int(is_wrong.argmax())
        raise InputError(
            f"feature_rows[{index}] is {rows[index]}, expected increasing rows from 0 to "
            f"{num_new - 1}"
        )


def check_parents(parents: ParentFeatures, num_new: int, kind: type) -> None:
    """Raise InputError unless these are features, of a session's kind, for every row."""
    for name, array in (("sources", parents.sources), ("rows", parents.rows)):
        if array.shape != (num_new,) or array.dtype != np.int64:
            raise InputError(
                f"parents.{name} has shape {array.shape} and type {array.dtype}, expected "
                f"({num_new},) and int64"
            )
    for features in parents.forwards:
        if not isinstance(features, kind):
            raise InputError(
                f"the features of a parent are {type(features).__name__}, this engine reads "
                f"{kind.__name__}; run target and draft on one provider and device"
            )
    sizes = np.array([*(len(features) for features in parents.forwards), 1])  # the last: zeros
    is_wrong = (parents.sources < -1) | (parents.sources >= len(parents.forwards))
    sources = np.where(is_wrong, -1, parents.sources)
    is_there = (parents.rows >= 0) & (parents.rows < sizes[sources])
    is_wrong |= (sources >= 0) & ~is_there
    if is_wrong.any():
        index = int(is_wrong.argmax())
        raise InputError(
            f"the parent of row {index} has its feature in row {parents.rows[index]} of forward "
            f"{parents.sources[index]}, expected one of {len(parents.forwards)} forwards with "
            f"{sizes[:-1].tolist()} rows"
        )
