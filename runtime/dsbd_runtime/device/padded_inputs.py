"""Inputs of device calls, whose sizes are rounded up: a forward and a move have padding rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.devices import PackedPart, StagedArrays
from dsbd_runtime.parts.attention_rows import SRC_ROWS, WRITE_INDICES


def move_parts(num_rows: int) -> list[PackedPart]:
    """Return the parts of the inputs of the prune graph, without caches."""
    return [(WRITE_INDICES, (1,), "int64"), (SRC_ROWS, (num_rows,), "int64")]


def fill_move(staged: StagedArrays, src_rows: NDArray[np.int64], first_row: int) -> None:
    """Write the inputs of a move; the padding copies the last source row again."""
    staged.on_host[WRITE_INDICES][0] = first_row
    fill_padded(staged.on_host[SRC_ROWS], src_rows, int(src_rows[-1]))


def fill_padded(target: NDArray[Any], array: NDArray[Any], padding: int) -> None:
    """Write an array to the beginning of a larger one, and ``padding`` to the rest."""
    target[tuple(map(slice, array.shape))] = array
    if target.shape != array.shape:
        axis = next(n for n, size in enumerate(array.shape) if size < target.shape[n])
        target[(*[slice(None)] * axis, slice(array.shape[axis], None))] = padding


def fill_mask(target: NDArray[np.bool_], mask: NDArray[np.bool_], first_row: int) -> None:
    """Write a mask (1, 1, S, C) to a larger one (1, 1, padded S, C).

    Padding rows are written to the cache after the call's own rows, where they are masked and the
    next call overwrites them. Each attends to itself: a row without visible columns may become
    NaN, and a NaN in the cache reaches every row, because masked rows are multiplied by 0, not
    skipped. It also attends to column 0, which is in use: on CUDA, ONNX Runtime searches each row
    of a mask sequentially for the first visible column.
    """
    num_new, padded = mask.shape[2], target[0, 0]
    padding = np.arange(num_new, len(padded))
    padded[:num_new] = mask[0, 0]
    padded[num_new:] = False
    padded[num_new:, 0] = True
    padded[padding, first_row + padding] = True
