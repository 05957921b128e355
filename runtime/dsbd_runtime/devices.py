"""Device interface of a DeviceSession: memory, copies, and graphs bound to memory.

``DeviceSession`` is written against these Protocols alone. Device memory is named by address, as
CUDA, ONNX Runtime (``bind_input`` with a pointer) and TensorRT (``set_tensor_address``) need it;
the host never accesses such memory directly.

Work on a device is queued in order: copies and calls return before they are done, and only
``synchronize`` waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "bool": 1, "uint8": 1}


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array in device memory, or a part of one; its allocator frees it.

    dtype: a key of ``ELEMENT_BYTES``, because numpy has no bf16.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes that the array takes."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def part(self, offset: int, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return the array of another shape and type that begins ``offset`` bytes into this one."""
        part = DeviceArray(self.address + offset, shape, dtype)
        if offset < 0 or offset + part.num_bytes > self.num_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + part.num_bytes} of an array of {self.num_bytes}"
            )
        return part


class RecordedWork(Protocol):
    """Copies and calls that the device runs as one unit, such as a CUDA graph."""

    def run(self) -> None:
        """Queue all of it once."""

    def free(self) -> None:
        """Destroy it; called once, before the memory that it uses is freed."""


class Device(Protocol):
    """One device's memory and its queue of work.

    ``free``, ``free_pinned`` and ``close`` raise nothing: they are also called after another error,
    which the caller must see.
    """

    @property
    def name(self) -> str:
        """Name in messages, such as "cuda:0"."""

    @property
    def num_waits(self) -> int:
        """Number of waits by ``synchronize``; work queued before the last wait is done."""

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return a new array of zeros; raise MemoryError when the device has no room."""

    def free(self, array: DeviceArray) -> None:
        """Free a result of ``allocate``, once the work in the queue is done."""

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory (num_bytes,) that the device copies from and to directly."""

    def free_pinned(self, buffer: NDArray[np.uint8]) -> None:
        """Free a result of ``allocate_pinned``, once the work in the queue is done."""

    def upload(self, source: NDArray[np.uint8], target: DeviceArray) -> None:
        """Queue a copy of pinned bytes to the first ``source.nbytes`` bytes of ``target``.

        ``source`` must not change before ``synchronize``.
        """

    def download(self, source: DeviceArray, target: NDArray[np.uint8]) -> None:
        """Queue a copy of the first ``target.nbytes`` bytes of ``source`` to pinned memory."""

    def copy_rows(self, source: DeviceArray, target: DeviceArray, num_rows: int) -> None:
        """Queue a copy of the first rows of a cache to another one of a different capacity.

        Both are [1, num_heads, capacity, width]: rows 0 to num_rows - 1 of every head.
        """

    def fill_zero(self, array: DeviceArray) -> None:
        """Queue setting every byte of ``array`` to zero."""

    def record(self, work: Callable[[], None]) -> RecordedWork:
        """Return the work that ``work`` queues, as one unit; none of it is run.

        ``work`` must not wait or allocate. Raises MemoryError, EngineError or an error of ``work``
        if it cannot be recorded; the queue is then as before.
        """

    def synchronize(self) -> None:
        """Wait until all queued work is done; raise its errors."""

    def close(self) -> None:
        """Release the queue; calling it again does nothing. All arrays have been freed before."""


class BoundCall(Protocol):
    """One graph with every input and output bound to device memory, ready to run many times."""

    def run(self) -> None:
        """Queue the graph once, or run it to its end; raise CapacityError without memory."""

    def release(self) -> None:
        """Drop the bindings, because their memory will be freed."""


class DeviceEngine(Protocol):
    """One graph (the model, or the one that moves cache rows) loaded on a device."""

    def capacity_for(self, num_rows: int) -> int:
        """Return the capacity of caches that hold ``num_rows``; CapacityError: there is none."""

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> BoundCall:
        """Return the call with these inputs and outputs, by name in the graph.

        A cache is in both, at the same address: past_key_values.0.key and present.0.key. Shapes
        are whole numbers: S is one of ``device_session.forward_bucket``, R (logit_rows) and K
        (src_rows) are powers of two up to the largest forward, or any smaller number where padding
        had no room in the caches.
        """

    def close(self) -> None:
        """Release the graph; calling it again does nothing. All calls have been released before."""


def copy_array_rows(
    device: Device,
    source: DeviceArray,
    source_row: int,
    target: DeviceArray,
    target_row: int,
    num_rows: int,
) -> None:
    """Queue the copy of neighbouring rows of one (n, width) array to another."""
    width = source.shape[1]
    row_bytes = width * ELEMENT_BYTES[source.dtype]
    shape = (1, 1, num_rows, width)
    device.copy_rows(
        source.part(source_row * row_bytes, shape, source.dtype),
        target.part(target_row * row_bytes, shape, target.dtype),
        num_rows,
    )
