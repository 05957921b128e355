"""Device interface of a DeviceSession: memory, copies, and graphs bound to memory.

``DeviceSession`` uses only these Protocols. The memory of an array has an address (CUDA, TensorRT)
or is a value of ONNX Runtime (plug-ins); the host never accesses it directly.

Work on a device is queued in order: copies and calls may return before they are done, and only
``synchronize`` waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "bool": 1, "uint8": 1}


PackedPart = tuple[str, tuple[int, ...], str]
"""Name, shape and type (a key of ``ELEMENT_BYTES``) of one array."""


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array in device memory, or a part of one; its allocator frees it."""

    memory: Any  # the device's memory: an address, or an object with a value of ONNX Runtime
    shape: tuple[int, ...]
    dtype: str  # a key of ``ELEMENT_BYTES``, because numpy has no bf16

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class StagedArrays(Protocol):
    """Arrays of one call on the host, each with its array on the device."""

    @property
    def on_host(self) -> Mapping[str, NDArray[Any]]:
        """The host's arrays by name; they are valid as long as their buffer."""

    @property
    def on_device(self) -> Mapping[str, DeviceArray]:
        """The device's arrays by name; the same in all calls."""

    def upload(self) -> None:
        """Queue the copy of all arrays to the device."""

    def download(self, num_rows: int) -> None:
        """Queue the copy of all arrays to the host; of the last array only ``num_rows`` rows."""


class Staging(Protocol):
    """Memory in which calls of different sizes lay out their arrays, one call at a time."""

    def lay_out(self, parts: Sequence[PackedPart]) -> StagedArrays:
        """Return arrays of these parts; they may share memory with arrays of other layouts."""

    def begin_write(self) -> None:
        """Wait until the device has read the last write, before the host writes again."""

    def free(self) -> None:
        """Release the memory, once the work in the queue is done."""


class RecordedWork(Protocol):
    """Copies and calls that the device runs as one unit, such as a CUDA graph."""

    def run(self) -> None:
        """Queue all of it once."""

    def free(self) -> None:
        """Destroy it; called once, before the memory that it uses is freed."""


class Device(Protocol):
    """One device's memory and its queue of work.

    ``free`` and ``close`` raise nothing: they are also called after another error, which the caller
    must see.
    """

    @property
    def name(self) -> str:
        """Name in messages, such as "cuda:0"."""

    @property
    def num_waits(self) -> int:
        """Number of waits by ``synchronize``; work queued before the last wait is done."""

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return a new array of zeros; raise MemoryError if the device has no room."""

    def free(self, array: DeviceArray) -> None:
        """Free a result of ``allocate``, once the work in the queue is done."""

    def staging(self, parts: Sequence[PackedPart]) -> Staging:
        """Return memory for these parts or smaller layouts; MemoryError: the device has no room."""

    def copy_rows(
        self,
        source: DeviceArray,
        target: DeviceArray,
        num_rows: int,
        source_row: int = 0,
        target_row: int = 0,
    ) -> None:
        """Queue a copy of neighbouring rows of one array to neighbouring rows of another.

        Both arrays are [..., rows, width]; the same rows of every head are copied.
        """

    def fill_zero(self, array: DeviceArray) -> None:
        """Queue setting every byte of ``array`` to zero."""

    def record(self, work: Callable[[], None]) -> RecordedWork:
        """Return the work that the function ``work`` queues, as one unit.

        A device that can record work only while running it also runs it. ``work`` must not wait or
        allocate. If it cannot be recorded, MemoryError, EngineError or an error of ``work`` is
        raised, and the queue is as before.
        """

    def synchronize(self) -> None:
        """Wait until all queued work is done; raise its errors."""

    def close(self) -> None:
        """Release the queue; calling it again does nothing. All arrays have been freed before."""


class BoundCall(Protocol):
    """One graph with every input and output bound to device memory, ready to run many times."""

    def run(self) -> None:
        """Queue the graph once, or run it to its end; CapacityError: there is no memory."""

    def release(self) -> None:
        """Drop the bindings, because their memory will be freed."""


class DeviceEngine(Protocol):
    """One graph (the model, or the one that moves cache rows) loaded on a device."""

    def capacity_for(self, num_rows: int) -> int:
        """Return the capacity of caches that hold ``num_rows``; CapacityError: too many rows."""

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> BoundCall:
        """Return the call with these inputs and outputs, by name in the graph.

        A cache is both an input and an output, with the same array: past_key_values.0.key and
        present.0.key. Shapes are whole numbers: S is one of ``device_binder.forward_bucket``; R
        (logit_rows) and K (src_rows) are powers of two up to the largest forward, or any smaller
        number if the caches have no room for padding.
        """

    def close(self) -> None:
        """Release the graph; calling it again does nothing. All calls have been released before."""
