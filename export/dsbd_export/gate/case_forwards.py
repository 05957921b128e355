"""Forwards of a parity case: which rows of the cache its tokens see, and where they stand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_export.parity_cases import ForestCase
from dsbd_forward.forward import Forward, Source
from dsbd_forward.rows import NO_INTS, Ints


def prefix_forward(case: ForestCase, first_row: int) -> Forward:
    """Return the forward that appends the prefix of a case as a path of its own."""
    ids = case.prefix_ids
    return _forward(case, ids, np.arange(-1, len(ids) - 1), first_row, (first_row, first_row))


def nodes_forward(
    case: ForestCase, first_row: int, prefix: tuple[int, int], num_nodes: int | None = None
) -> Forward:
    """Return the forward of a case's nodes after ``prefix``, its first and end row; no logits."""
    nodes = slice(num_nodes)
    return _forward(case, case.node_ids[nodes], case.parents[nodes], first_row, prefix)


def _forward(
    case: ForestCase, token_ids: Ints, parents: Ints, first_row: int, prefix: tuple[int, int]
) -> Forward:
    mask, positions = see_rows(parents, first_row, first_row + len(parents), prefix)
    return Forward(token_ids, positions, mask, NO_INTS, source=source_of(case))


def source_of(case: ForestCase) -> Source:
    """Return the source of a case as a forward takes it, None without a source."""
    if case.source_ids is None:
        return case.sound
    return tuple(case.source_ids.tolist())


def see_rows(
    parents: Ints, first_row: int, capacity: int, prefix: tuple[int, int] | None = None
) -> tuple[NDArray[np.bool_], Ints]:
    """Return the rows that nodes from ``first_row`` on see, (S, C) bool, and their positions, (S,).

    With parents [-1, -1, 0] and first_row 1, node 2 sees rows 0, 1, 3 and stands at position 2.
    """
    begin, end = prefix or (0, first_row)
    visible = np.zeros((len(parents), capacity), np.bool_)
    positions = np.zeros(len(parents), np.int64)
    visible[:, begin:end] = True
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            visible[node] |= visible[parent]
        visible[node, first_row + node] = True
        positions[node] = end - begin if parent < 0 else positions[parent] + 1
    return visible, positions
