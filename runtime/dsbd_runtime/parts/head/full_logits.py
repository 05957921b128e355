"""Full logits of a top-k head: they stay where the engine writes them; reads copy single rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import Ints
from dsbd_runtime.devices import Device, DeviceArray, StagedArrays, Staging
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.device_binder import StagedCall
from dsbd_runtime.parts.host_binder import HeadOutput, HostBinder

_STAGED_ROWS = 8
"""Rows that a read copies from a device at a time, which bounds the memory for it."""


class HostLogits:
    """Full logits of the last forward, in one buffer for the largest forward so far.

    The number of its rows is a power of two.
    """

    def __init__(self, output: HeadOutput) -> None:
        self._output = output
        self._buffer = np.empty(output.shape(0), output.dtype)
        # By first row and number of rows; making a value takes longer than binding it.
        self._values: dict[tuple[int, int], Any] = {}

    def bind(self, binder: HostBinder, first_row: int, num_logit_rows: int) -> None:
        """Let the next call write R rows from ``first_row`` on; those before it stay."""
        place, stop = (first_row, num_logit_rows), first_row + num_logit_rows
        if stop > len(self._buffer):
            larger = np.empty(self._output.shape(_room(stop)), np.float32)
            larger[:first_row] = self._buffer[:first_row]
            self._buffer = larger
            self._values.clear()
        if place not in self._values:
            self._values[place] = binder.value_on(self._buffer[first_row:stop])
        binder.write_value(self._output.name, self._values[place])

    def read(self, rows: Ints) -> NDArray[np.float32]:
        """Return a copy of some rows of the memory, (n, V)."""
        return self._buffer[rows]

    def read_tokens(self, rows: Ints, token_ids: Ints) -> NDArray[np.float32]:
        """Return one number from each of some rows of the memory; all arrays are (n,)."""
        return self._buffer[rows, token_ids]

    def close(self) -> None:
        self._values.clear()


class DeviceLogits:
    """Full logits of the last forward in device memory: an array for each size of call.

    The arrays outlast the caches. So a read between two calls finds the rows even if the caches
    were replaced, and captured calls find their arrays. The sizes are those of ``forward_bucket``.
    If a forward has several calls, its rows are copied after each call to a further array, because
    the next call of the same size overwrites them.
    """

    def __init__(self, device: Device, output: HeadOutput) -> None:
        self._device = device
        self._name = output.name
        (self._vocab_size,) = output.row_shape
        self._arrays: dict[int, DeviceArray] = {}
        self._joined: dict[int, DeviceArray] = {}  # for forwards of several calls
        self._last: DeviceArray | None = None  # the one with the rows of the last forward
        self._staging: tuple[Staging, StagedArrays] | None = None

    def bind(self, binder: StagedCall, first_row: int, num_logit_rows: int) -> None:
        num_rows, before = binder.size("R", num_logit_rows), self._last
        array = self._last = self._array(self._arrays, num_rows)
        binder.use(self._name, array)
        if not first_row:
            return
        joined = self._last = self._array(self._joined, _room(first_row + num_logit_rows))
        copy = self._device.copy_rows

        def copy_before() -> None:
            if before is not None and before is not joined:
                copy(before, joined, min(first_row, before.shape[0]))

        binder.before(copy_before)
        binder.after(lambda: copy(array, joined, num_logit_rows, target_row=first_row))

    def read(self, rows: Ints) -> NDArray[np.float32]:
        """See HostLogits; raise CapacityError without memory for the copies."""
        logits = np.empty((len(rows), self._vocab_size), np.float32)
        for start, some in self._downloaded(rows):
            logits[start : start + len(some)] = some
        return logits

    def read_tokens(self, rows: Ints, token_ids: Ints) -> NDArray[np.float32]:
        """See HostLogits; whole rows are copied, because a gather would need another graph."""
        distinct, place = np.unique(rows, return_inverse=True)
        logits = np.empty(len(rows), np.float32)
        for start, some in self._downloaded(distinct):
            is_here = (start <= place) & (place < start + len(some))
            logits[is_here] = some[place[is_here] - start, token_ids[is_here]]
        return logits

    def _downloaded(self, rows: Ints) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the place of the first of some rows, and the rows, valid until the next ones."""
        if self._staging is None:
            parts = [(self._name, (_STAGED_ROWS, self._vocab_size), "fp32")]
            try:
                staging = self._device.staging(parts)
                self._staging = staging, staging.lay_out(parts)
            except MemoryError as error:
                raise CapacityError(
                    f"{self._device.name} has no memory to copy full logits ({error}); close "
                    "other programs that use the memory"
                ) from error
        assert self._last is not None  # a call has been bound
        staged = self._staging[1]
        target = staged.on_device[self._name]
        for start in range(0, len(rows), _STAGED_ROWS):
            part = rows[start : start + _STAGED_ROWS]
            for place, row in enumerate(part.tolist()):
                self._device.copy_rows(self._last, target, 1, row, place)
            staged.download(len(part))
            self._device.synchronize()
            yield start, staged.on_host[self._name][: len(part)]

    def _array(self, arrays: dict[int, DeviceArray], num_rows: int) -> DeviceArray:
        """Return the array of ``num_rows`` rows among ``arrays``; MemoryError: no room."""
        if num_rows not in arrays:
            arrays[num_rows] = self._device.allocate((num_rows, self._vocab_size), "fp32")
        return arrays[num_rows]

    def close(self) -> None:
        """Release the memory; the calls bound to it have been released."""
        for arrays in (self._arrays, self._joined):
            for array in arrays.values():
                self._device.free(array)
            arrays.clear()
        if self._staging is not None:
            self._staging[0].free()
            self._staging = None


def _room(num_rows: int) -> int:
    """Return the smallest power of two that holds ``num_rows``."""
    return 1 << max(num_rows - 1, 0).bit_length()
