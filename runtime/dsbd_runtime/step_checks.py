"""The border of CausalLM: what it takes for a step and for keep, and what it says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import CapacityError, InputError

# A mask is looked at in blocks of this many rows, so that the check makes no second (S, S) array.
_BLOCK_ROWS = 256
_INT64, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)
_IS_LATER = ~np.tri(_BLOCK_ROWS, dtype=np.bool_)  # (_BLOCK_ROWS, _BLOCK_ROWS)


def check_step(
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    mask: NDArray[np.bool_],
    logit_rows: NDArray[np.int64],
    *,
    num_rows: int,
    vocab_size: int,
    context_length: int,
) -> None:
    """Raise InputError or CapacityError unless a model with ``num_rows`` rows can take the step."""
    _check_array("token_ids", token_ids, _INT64, 1)
    num_new = token_ids.shape[0]
    if num_new == 0:
        raise InputError("token_ids is empty, expected at least one row; leave the step out")
    _check_array("positions", positions, _INT64, 1)
    _check_array("mask", mask, _BOOL, 2)
    _check_array("logit_rows", logit_rows, _INT64, 1)
    _check_shape("positions", positions, (num_new,))
    _check_shape("mask", mask, (num_new, num_rows + num_new))
    _check_range("token_ids", token_ids, vocab_size)
    if (highest := positions.max()) >= context_length:
        raise CapacityError(
            f"position {highest} does not fit, the model was made for {context_length} "
            f"positions (0 to {context_length - 1}); shorten the prompt or ask for fewer new tokens"
        )
    _check_range("positions", positions, context_length)
    _check_range("logit_rows", logit_rows, num_new)
    _check_parents_first(mask, num_rows)


def check_keep(rows: NDArray[np.int64], num_rows: int) -> None:
    """Raise InputError unless ``rows`` are strictly increasing rows of the cache."""
    _check_array("rows", rows, _INT64, 1)
    _check_range("rows", rows, num_rows)
    falls = rows[1:] <= rows[:-1]
    if falls.any():
        index = int(np.argmax(falls)) + 1
        raise InputError(
            f"rows[{index}] is {rows[index]} after {rows[index - 1]}, expected strictly "
            "increasing rows; sort them and drop repeats"
        )


def _check_array(name: str, array: Any, dtype: np.dtype[Any], num_dims: int) -> None:
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == num_dims:
        return
    found = f"is a {type(array).__name__}"
    if isinstance(array, np.ndarray):
        found = f"has shape {array.shape} and type {array.dtype}"
    raise InputError(f"{name} {found}, expected a numpy array of {num_dims} dimensions, {dtype}")


def _check_shape(name: str, array: NDArray[Any], wanted: tuple[int, ...]) -> None:
    if array.shape != wanted:
        raise InputError(
            f"{name} has shape {array.shape}, expected {wanted} from token_ids and the cache"
        )


def _check_range(name: str, array: NDArray[np.int64], stop: int) -> None:
    if array.size and array.view(np.uint64).max() >= stop:  # a negative number is a huge one
        index = int(np.argmax((array < 0) | (array >= stop)))
        raise InputError(f"{name}[{index}] is {array[index]}, expected 0 to {stop - 1}")


def _check_parents_first(mask: NDArray[np.bool_], num_rows: int) -> None:
    """Refuse a row that sees a later one of the same step: long steps run in chunks."""
    for start in range(0, mask.shape[0], _BLOCK_ROWS):
        block = mask[start : start + _BLOCK_ROWS]
        size, first, stop = block.shape[0], num_rows + start, num_rows + start + block.shape[0]
        is_later = _IS_LATER[:size, :size]
        sees_later = (block[:, first:stop] & is_later).any()
        if sees_later or (stop < mask.shape[1] and block[:, stop:].any()):
            raise InputError(
                "mask lets a row see a later row of the same step; order the rows so that "
                "parents come before children"
            )
