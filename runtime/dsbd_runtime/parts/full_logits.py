"""Full logits of a top-k head: kept where the engine writes them, copied by row when read."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.devices import ELEMENT_BYTES, Device, DeviceArray
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.forward_checks import check_read
from dsbd_runtime.parts.part import DeviceBinder, HeadOutput, HostBinder

_STAGED_ROWS = 8
"""Rows that a read copies from a device at a time, which bounds the pinned memory."""


class LastLogits(Protocol):
    """All logits of an engine's last call.

    Attributes:
        num_forwards: how many have begun; another number than before: rows are overwritten.
    """

    num_forwards: int

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of the logits of some of the call's logit rows, (n, V)."""


class KeptLogits:
    """The ``FullLogits`` of a model's last forward; its next one overwrites and expires them.

    Attributes:
        first_row: first of the R rows that can be read.
    """

    def __init__(self, last: LastLogits, logit_rows: NDArray[np.int64], last_start: int) -> None:
        """Take the logits after the forward's last call.

        Of the logit rows [299, 3, 255, 256] and a last call that begins with row 256, the engine
        holds [299, 256]: only the last of the four can be read, as row 3, its row 1.

        Args:
            last: those of the last call.
            logit_rows: (R,) int64. Those of the forward.
            last_start: the forward's row with which its last call began.
        """
        self._last = last
        self._num_forwards = last.num_forwards
        self._num_rows = len(logit_rows)
        self.first_row = 0
        self._held_row = 0  # the last call's logit row that is first_row
        if last_start:  # rare, and the arrays below take longer than all else here
            is_held = logit_rows >= last_start  # (R,)
            overwritten = np.flatnonzero(~is_held)
            self.first_row = int(overwritten[-1]) + 1 if len(overwritten) else 0
            self._held_row = int(np.count_nonzero(is_held[: self.first_row]))

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See FullLogits."""
        if self._last.num_forwards != self._num_forwards:
            raise InputError(
                "full logits are read after the model's next forward or its end, which overwrite "
                "them; read those of a forward before the next one"
            )
        check_read(rows, self.first_row, self._num_rows)
        return self._last.read(rows - self.first_row + self._held_row)


class HostLogits:
    """Full logits of the last call in host memory.

    One buffer for all calls, a power of two of rows, as large as the largest call has needed; the
    engine would take the same memory for its intermediate result.
    """

    def __init__(self, output: HeadOutput) -> None:
        """Take the output of all logits."""
        self._output = output
        self._buffer = np.empty(output.shape(0, 0), output.dtype)
        self._values: dict[int, Any] = {}  # by rows; to make one takes longer than to bind it

    def bind(self, binder: HostBinder, num_logit_rows: int) -> None:
        """See FullMemory. The logits of the last call are lost."""
        if num_logit_rows > len(self._buffer):
            self._buffer = np.empty(self._output.shape(_room(num_logit_rows), 0), np.float32)
            self._values.clear()
        if num_logit_rows not in self._values:
            self._values[num_logit_rows] = binder.value_on(self._buffer[:num_logit_rows])
        binder.write_value(self._output.name, self._values[num_logit_rows])

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See FullMemory."""
        return self._buffer[rows]

    def close(self) -> None:
        """See FullMemory."""
        self._values.clear()


class DeviceLogits:
    """Full logits of the last call in device memory: an array for each power of two of rows.

    They outlast the caches, so that a read between two calls finds the rows whatever became of the
    caches, and captured calls find their addresses. All together hold at most twice the rows of the
    largest.
    """

    def __init__(self, device: Device, output: HeadOutput) -> None:
        """Take the output of all logits."""
        self._device = device
        self._name = output.name
        (self._vocab_size,) = output.row_shape
        self._arrays: dict[int, DeviceArray] = {}
        self._staging: NDArray[np.uint8] | None = None

    def bind(self, binder: DeviceBinder, num_logit_rows: int) -> None:
        """See FullMemory."""
        num_rows = binder.size("R", num_logit_rows)
        room = _room(num_rows)
        if room not in self._arrays:
            self._arrays[room] = self._device.allocate((room, self._vocab_size), "fp32")
        self._last = self._arrays[room]
        binder.use(self._name, self._last.part(0, (num_rows, self._vocab_size), "fp32"))

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See FullMemory.

        Raises:
            CapacityError: no pinned memory.
        """
        array, row_bytes = self._last, self._vocab_size * ELEMENT_BYTES["fp32"]
        if self._staging is None:
            try:
                self._staging = self._device.allocate_pinned(_STAGED_ROWS * row_bytes)
            except MemoryError as error:
                raise CapacityError(
                    f"{self._device.name} has no memory to copy full logits ({error}); close "
                    "other programs that use the memory"
                ) from error
        staged = self._staging.reshape(_STAGED_ROWS, row_bytes)
        logits = np.empty((len(rows), self._vocab_size), np.float32)
        for start in range(0, len(rows), _STAGED_ROWS):
            part = rows[start : start + _STAGED_ROWS]
            for row, target in zip(part.tolist(), staged, strict=False):
                source = array.part(row * row_bytes, (self._vocab_size,), "fp32")
                self._device.download(source, target)
            self._device.synchronize()
            logits[start : start + len(part)] = staged[: len(part)].view(np.float32)
        return logits

    def close(self) -> None:
        """See FullMemory; the calls bound to it have been released."""
        for array in self._arrays.values():
            self._device.free(array)
        self._arrays.clear()
        if self._staging is not None:
            self._device.free_pinned(self._staging)
            self._staging = None


def _room(num_rows: int) -> int:
    """Return the smallest power of two that holds ``num_rows``."""
    return 1 << max(num_rows - 1, 0).bit_length()
