"""Checks of the arrays of a forward."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_runtime.errors import CapacityError, DsbdError, InputError

# A mask is looked at in blocks of this many rows, so that the check makes no second (S, S) array.
_BLOCK_ROWS = 256
_FEW = 64  # numbers: a list is faster than numpy, whose code is cold after an engine call
_INT64, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)
_ARRAYS = (
    ("token_ids", _INT64, 1),
    ("positions", _INT64, 1),
    ("mask", _BOOL, 2),
    ("logit_rows", _INT64, 1),
)
_IS_LATER = ~np.tri(_BLOCK_ROWS, dtype=np.bool_)  # (_BLOCK_ROWS, _BLOCK_ROWS)


def check_forward(inputs: Forward, *, num_rows: int, vocab_size: int, context_length: int) -> None:
    """Raise InputError or CapacityError unless a model with ``num_rows`` rows takes the inputs."""
    for name, dtype, num_dims in _ARRAYS:
        check_array(name, getattr(inputs, name), dtype, num_dims)
    tokens, positions, mask = inputs.token_ids, inputs.positions, inputs.mask
    num_new = len(tokens)
    if num_new == 0:
        raise InputError("token_ids is empty, expected at least one row; skip the forward")
    if positions.shape != (num_new,):
        raise _wrong_shape("positions", positions, (num_new,))
    if mask.shape != (num_new, num_rows + num_new):
        raise _wrong_shape("mask", mask, (num_new, num_rows + num_new))
    if not _are_below(tokens, vocab_size):
        raise _out_of_range("token_ids", tokens, vocab_size)
    if not _are_below(positions, context_length):
        raise _wrong_position(positions, context_length)
    if not _are_below(inputs.logit_rows, num_new):
        raise _out_of_range("logit_rows", inputs.logit_rows, num_new)
    if num_new > 1 and not inputs.is_ordered:
        _check_parents_first(mask, num_rows)


def check_keep(rows: NDArray[np.int64], num_rows: int) -> None:
    """Raise InputError unless ``rows`` are strictly increasing rows of the cache."""
    check_array("rows", rows, _INT64, 1)
    check_range("rows", rows, num_rows)
    falls = rows[1:] <= rows[:-1]
    if falls.any():
        index = int(np.argmax(falls)) + 1
        raise InputError(
            f"rows[{index}] is {rows[index]} after {rows[index - 1]}, expected strictly "
            "increasing rows; sort them and drop repeats"
        )


def check_array(name: str, array: Any, dtype: np.dtype[Any], num_dims: int) -> None:
    """Raise InputError unless it is an array of this type and number of dimensions."""
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == num_dims:
        return
    fault = f"is a {type(array).__name__}"
    if isinstance(array, np.ndarray):
        fault = f"has shape {array.shape} and type {array.dtype}"
    raise InputError(f"{name} {fault}, expected a numpy array of {num_dims} dimensions, {dtype}")


def check_range(name: str, array: NDArray[np.int64], stop: int) -> None:
    """Raise InputError unless all numbers are 0 to ``stop - 1``."""
    if not _are_below(array, stop):
        raise _out_of_range(name, array, stop)


def _wrong_shape(name: str, array: NDArray[Any], expected: tuple[int, ...]) -> InputError:
    return InputError(
        f"{name} has shape {array.shape}, expected {expected} from token_ids and the cache"
    )


def _out_of_range(name: str, array: NDArray[np.int64], stop: int) -> InputError:
    index = int(np.argmax((array < 0) | (array >= stop)))
    return InputError(f"{name}[{index}] is {array[index]}, expected 0 to {stop - 1}")


def _wrong_position(positions: NDArray[np.int64], context_length: int) -> DsbdError:
    if (highest := positions.max()) < context_length:
        return _out_of_range("positions", positions, context_length)
    return CapacityError(
        f"position {highest} does not fit, the model was made for {context_length} "
        f"positions (0 to {context_length - 1}); shorten the prompt or ask for fewer new tokens"
    )


def _are_below(array: NDArray[np.int64], stop: int) -> bool:
    if len(array) <= _FEW:
        numbers = array.tolist()
        return not numbers or (min(numbers) >= 0 and max(numbers) < stop)
    return bool(array.view(np.uint64).max() < stop)  # a negative number is a huge one


def _check_parents_first(mask: NDArray[np.bool_], num_rows: int) -> None:
    """Refuse a row that sees a later one of the same forward: long forwards run in chunks."""
    for start in range(0, mask.shape[0], _BLOCK_ROWS):
        block = mask[start : start + _BLOCK_ROWS]
        size, first, stop = block.shape[0], num_rows + start, num_rows + start + block.shape[0]
        is_later = _IS_LATER[:size, :size]
        sees_later = np.logical_or.reduce(block[:, first:stop] & is_later, axis=None)
        if sees_later or (stop < mask.shape[1] and block[:, stop:].any()):
            raise InputError(
                "mask lets a row see a later row of the same forward; order the rows so that "
                "parents come before children"
            )
