"""The inputs of one device call, packed and padded: what the rows of the padding see, and write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime import graph
from dsbd_runtime.packed_buffer import PackedArrays, Part
from dsbd_runtime.session import StepInputs


def step_parts(
    num_rows: int, num_logit_rows: int, capacity: int, mask_names: Sequence[str]
) -> list[Part]:
    """Return the parts of the inputs of a call, caches aside, in the engine's shapes."""
    return [
        (graph.WRITE_INDICES, (1,), "int64"),
        (graph.INPUT_IDS, (1, num_rows), "int64"),
        (graph.POSITION_IDS, (1, num_rows), "int64"),
        (graph.LOGIT_ROWS, (num_logit_rows,), "int64"),
        *((name, (1, 1, num_rows, capacity), "bool") for name in mask_names),
    ]


def move_parts(num_rows: int) -> list[Part]:
    """Return the parts of the inputs of the prune graph, caches aside."""
    return [(graph.WRITE_INDICES, (1,), "int64"), (graph.SRC_ROWS, (num_rows,), "int64")]


def fill_step(staged: PackedArrays, inputs: StepInputs) -> None:
    """Write the inputs of a step; what the call has more rows than the step is padding.

    Padding rows are written to the cache behind the step's own rows, where no mask looks and the
    next step overwrites them. Each sees itself alone: a row that sees nothing may come out as NaN,
    and a NaN in the cache reaches every row, since a masked row still enters a product, times 0.
    """
    host, num_new = staged.on_host, inputs.token_ids.shape[0]
    host[graph.WRITE_INDICES][0] = inputs.first_row
    _fill_padded(host[graph.INPUT_IDS][0], inputs.token_ids, 0)
    _fill_padded(host[graph.POSITION_IDS][0], inputs.positions, 0)
    _fill_padded(host[graph.LOGIT_ROWS], inputs.logit_rows, 0)
    for name, mask in inputs.masks.items():
        padded = host[name][0, 0]  # (padded S, capacity)
        padded[:num_new] = mask
        padded[num_new:] = False
        padding = np.arange(num_new, padded.shape[0])
        padded[padding, inputs.first_row + padding] = True


def fill_move(staged: PackedArrays, src_rows: NDArray[np.int64], first_row: int) -> None:
    """Write the inputs of a move; the padding copies the last source once more, behind the rest."""
    staged.on_host[graph.WRITE_INDICES][0] = first_row
    _fill_padded(staged.on_host[graph.SRC_ROWS], src_rows, int(src_rows[-1]))


def fill_idle_move(staged: PackedArrays) -> None:
    """Write the inputs of a move that leaves every row in its place, however often it runs."""
    staged.on_host[graph.WRITE_INDICES][0] = 0
    src_rows = staged.on_host[graph.SRC_ROWS]
    src_rows[:] = np.arange(src_rows.shape[0])


def _fill_padded(target: NDArray[np.int64], values: NDArray[np.int64], padding: int) -> None:
    target[: values.shape[0]] = values
    target[values.shape[0] :] = padding
