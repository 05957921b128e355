"""Rows of the cache that the nodes of a parity case see, of one request or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_export.parity_cases import ForestCase


@dataclass(frozen=True)
class SeenRows:
    """What the nodes of a call see, and where they stand.

    Attributes:
        visible: (S, C) bool.
        positions: (S,) int64.
        row_positions: (C,) int64. Of all rows of the cache, the new ones included.
    """

    visible: NDArray[np.bool_]
    positions: NDArray[np.int64]
    row_positions: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        parents: NDArray[np.int64],
        first_row: int,
        row_positions: NDArray[np.int64],
        prefixes: NDArray[np.int64] | None = None,
    ) -> SeenRows:
        """Return what nodes see from ``first_row`` on, see ``see_rows``.

        row_positions: (C,) int64. Of the rows before them; the new ones are set in place.
        """
        visible, positions = see_rows(parents, first_row, len(row_positions), prefixes)
        row_positions[first_row : first_row + len(positions)] = positions
        return cls(visible, positions, row_positions)


def see_rows(
    parents: NDArray[np.int64],
    first_row: int,
    capacity: int,
    prefixes: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return the rows that nodes from ``first_row`` on see, (S, C) bool, and their positions, (S,).

    A node sees the rows before ``first_row``, its ancestors and itself. With parents
    [-1, -1, 0] and first_row 1, node 2 sees rows 0, 1, 3 and stands at position 2.

    prefixes: (S, 2) int64. Nodes of several requests see only rows of their own before
    ``first_row``: the first of these, and the one behind the last.
    """
    if prefixes is None:
        prefixes = np.tile([0, first_row], (len(parents), 1))
    visible = np.zeros((len(parents), capacity), np.bool_)
    positions = np.zeros(len(parents), np.int64)
    for node, (parent, (begin, end)) in enumerate(zip(parents, prefixes.tolist(), strict=True)):
        visible[node, begin:end] = True
        if parent >= 0:
            visible[node] |= visible[parent]
        visible[node, first_row + node] = True
        positions[node] = end - begin if parent < 0 else positions[parent] + 1
    return visible, positions


def rows_above(parents: NDArray[np.int64], first_row: int, number: int) -> NDArray[np.int64]:
    """Return the last rows of the path to each node from ``first_row`` on, (S, number) int64.

    The oldest first, -1 before the path begins. With parents [-1, -1, 0], first_row 1 and number 2:
    [[-1, 0], [-1, 0], [0, 1]].
    """
    rows = np.zeros((len(parents), number), np.int64)
    for node, parent in enumerate(parents):
        if parent < 0:
            rows[node] = np.arange(first_row - number, first_row)
        else:
            rows[node] = [*rows[parent, 1:], first_row + parent]
    return np.maximum(rows, -1)


@dataclass(frozen=True)
class NodesTogether:
    """The nodes of several requests, one behind the other, behind the prefixes of all.

    Attributes:
        node_ids, parents: (S,) int64. See ``ForestCase``.
        rows: (R,) int64. Those that are compared.
        prefixes: (n, 2) int64. The first cache row of each request's prefix, and the one behind.
        sizes: nodes of each.
    """

    node_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    rows: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    sizes: list[int]

    @classmethod
    def of(cls, requests: Sequence[ForestCase]) -> NodesTogether:
        """Return those of some requests."""
        ends = np.cumsum([len(request.prefix_ids) for request in requests])
        sizes = [len(request.node_ids) for request in requests]
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        placed = list(zip(requests, begins, strict=True))
        parents = [np.where(each.parents < 0, -1, each.parents + begin) for each, begin in placed]
        return cls(
            np.concatenate([request.node_ids for request in requests]),
            np.concatenate(parents),
            np.concatenate([request.rows + begin for request, begin in placed]),
            np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1),
            sizes,
        )
