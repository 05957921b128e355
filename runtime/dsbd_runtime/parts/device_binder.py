"""Binder of a device's calls: collects the arrays of a call, with sizes rounded up."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.host_binder import HeadOutput
from dsbd_runtime.parts.part import Call, Tensors

_FORWARD_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_MOST = 2**40  # beyond any memory, for dimensions without a bound


class StagedCall:
    """One call of an engine, before it is bound to the device's memory, once for each size.

    S and R are rounded up to one of ``forward_bucket``, other dimensions to powers of two.

    sizes: sizes of the dimensions so far, by name; calls of equal sizes are bound once.
    first_row: cache row of the first of the call's rows.
    written: host arrays that the call reads, with their padding values.
    used: device arrays that it reads or writes.
    outputs: outputs of the head, for ``num_logit_rows`` rows.
    befores, afters: copies on the device around the call.
    run_s: seconds from the queueing of the first work to the end of all work.
    sets_up: whether the call was bound or recorded, which later ones of its sizes are not.
    """

    is_cleared = True

    def __init__(self, inputs: Tensors, call: Call, *, capacity: int, most_rows: int) -> None:
        """Begin a call; padding must not exceed ``capacity``, the rows of the caches."""
        num_new = call.forward.num_new
        if num_new > most_rows:
            raise InputError(
                f"a forward of {num_new} rows, the session takes {most_rows}; split it"
            )
        padded = forward_bucket(num_new, most_rows)
        self.first_row = call.first_row
        self.sizes = {
            "S": padded if call.first_row + padded <= capacity else num_new,
            "C": capacity,
        }
        self.written: dict[str, tuple[NDArray[Any], int]] = {}
        self.used: dict[str, DeviceArray] = {}
        self.outputs: tuple[HeadOutput, ...] = ()
        self.num_logit_rows = 0
        self.befores: list[Callable[[], None]] = []
        self.afters: list[Callable[[], None]] = []
        self.run_s = 0.0
        self.sets_up = False
        self._inputs = inputs

    def size(self, dim: str, number: int) -> int:
        """Return the size of a dimension in the call; the call uses ``number`` rows of it."""
        if dim not in self.sizes:
            bucket = forward_bucket if dim == "R" else row_bucket
            self.sizes[dim] = bucket(number, _MOST)
        return self.sizes[dim]

    def write(self, arrays: Mapping[str, NDArray[Any]], padding: int = 0) -> None:
        """Let the call read host arrays by name; ``padding`` is the value in padding rows."""
        for name, array in arrays.items():
            self.written[name] = array, padding
            for dim, number in zip(self._inputs[name].shape, array.shape, strict=True):
                if isinstance(dim, str):
                    self.size(dim, number)

    def room(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a host array that the call reads by name, for the caller to fill."""
        self.write({name: np.empty(shape, dtype)})
        return self.written[name][0]

    def returns(self, outputs: tuple[HeadOutput, ...], num_logit_rows: int) -> None:
        self.outputs, self.num_logit_rows = outputs, num_logit_rows

    def use(self, name: str, array: DeviceArray) -> None:
        """Let the call read or write a device array, the same one in all calls of its size."""
        self.used[name] = array

    def before(self, work: Callable[[], None]) -> None:
        self.befores.append(work)

    def after(self, work: Callable[[], None]) -> None:
        self.afters.append(work)


def row_bucket(num_rows: int, limit: int) -> int:
    """Return the least power of two that holds ``num_rows``, from 1 to ``limit``: 33 gives 64."""
    return min(1 << max(num_rows - 1, 0).bit_length(), limit)


def forward_bucket(num_rows: int, limit: int) -> int:
    """Return the rows of the call that a forward of ``num_rows`` rows is padded to.

    The steps are finer than those of ``row_bucket`` for common verifications, because each padding
    row costs attention and products: with a limit of 256, 9 gives 16, 33 gives 40, 49 gives 64, 100
    gives 128. The steps are multiples of 8, which suits tensor cores.
    """
    fitting = (rows for rows in _FORWARD_ROWS if rows >= num_rows)
    return min(next(fitting, row_bucket(num_rows, limit)), limit)


def padded_rows(num_new: int, limit: int) -> int:
    """Return the rows of all calls of at most ``limit`` rows, with padding: 300 give 256 + 48."""
    rest = num_new % limit
    return num_new - rest + (forward_bucket(rest, limit) if rest else 0)
