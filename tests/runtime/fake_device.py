"""A device made of host memory: it counts what crosses, and engines run on the CPU provider."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.device.bound_calls import LoadedModel
from dsbd_runtime.device.cuda_device import PackedBuffer, packed_bytes
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.device.ort_engine import OrtEngine
from dsbd_runtime.devices import ELEMENT_BYTES, BoundCall, DeviceArray, DeviceEngine, PackedPart
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.attention_rows import INPUT_IDS, MAX_FORWARD_ROWS, WRITE_INDICES
from tests.ort_sessions import cpu_session

POISON = 1e4
CACHE_DIMS = 4


@dataclass
class Traffic:
    """Operations of a device since the start or ``clear``.

    Attributes:
        counts: operations by name.
        num_bytes: bytes that each operation moved or took, by name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, num_bytes: int = 0) -> None:
        self.counts[operation] += 1
        self.num_bytes[operation] += num_bytes

    def clear(self) -> None:
        self.counts.clear()
        self.num_bytes.clear()


class FakeDevice:
    """A Device in host memory, so that its addresses mean something to the CPU provider.

    Uploads and downloads take place at ``synchronize`` or at a call, not before: whoever changes
    pinned memory too early, or reads it too early, gets the wrong values. A freed array is
    overwritten.

    Attributes:
        room: bytes that may still be allocated.
        traffic: what was done.
        live: by address, the memory of the arrays that were not freed.
    """

    name = "fake:0"

    def __init__(self, room: int = 2**40) -> None:
        self.room = room
        self.traffic = Traffic()
        self.live: dict[int, NDArray[np.uint8]] = {}
        self.pinned: dict[int, NDArray[np.uint8]] = {}
        self.is_closed = False
        self.num_waits = 0
        self.recorded: list[FakeRecording] = []
        self.is_recording = False
        self._queue: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        assert not self.is_recording
        num_bytes = int(np.prod(shape)) * ELEMENT_BYTES[dtype]
        self.traffic.add("allocate", num_bytes)
        if num_bytes > self.room:
            raise MemoryError(f"{num_bytes} bytes")
        self.room -= num_bytes
        memory = np.zeros(num_bytes, np.uint8)
        self.live[memory.ctypes.data] = memory
        return DeviceArray(memory.ctypes.data, shape, dtype)

    def free(self, array: DeviceArray) -> None:
        self._drain()
        memory = self.live.pop(array.memory)
        self.room += memory.nbytes
        memory[:] = 0x7F

    def staging(self, parts: Sequence[PackedPart]) -> PackedBuffer:
        return PackedBuffer(self, packed_bytes(parts))  # type: ignore[arg-type]

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        self.traffic.add("allocate_pinned", num_bytes)
        buffer = np.zeros(num_bytes, np.uint8)
        self.pinned[buffer.ctypes.data] = buffer
        return buffer

    def free_pinned(self, buffer: NDArray[np.uint8]) -> None:
        self._drain()
        del self.pinned[buffer.ctypes.data]

    def upload(self, source: NDArray[np.uint8], target: DeviceArray) -> None:
        assert source.ctypes.data in self.pinned
        self.traffic.add("upload", source.nbytes)
        self._queue.append((self.memory_of(target)[: source.nbytes], source))

    def download(self, source: DeviceArray, target: NDArray[np.uint8]) -> None:
        assert any(np.shares_memory(target, pinned) for pinned in self.pinned.values())
        self.traffic.add("download", target.nbytes)
        self._queue.append((target, self.memory_of(source)[: target.nbytes]))

    def copy_rows(
        self,
        source: DeviceArray,
        target: DeviceArray,
        num_rows: int,
        source_row: int = 0,
        target_row: int = 0,
    ) -> None:
        self._drain()
        views = [
            self._rows_of(array)[:, first : first + num_rows]
            for array, first in ((target, target_row), (source, source_row))
        ]
        self.traffic.add("copy_rows", views[0].nbytes)
        views[0][:] = views[1]

    def fill_zero(self, array: DeviceArray) -> None:
        self._drain()
        self.traffic.add("fill_zero", array.num_bytes)
        self.memory_of(array)[:] = 0

    def synchronize(self) -> None:
        assert not self.is_recording
        self.traffic.add("synchronize")
        self.num_waits += 1
        self._drain()

    def record(self, work: Callable[[], None]) -> FakeRecording:
        """Run ``work`` for what it queues, and undo that: nothing is done by recording."""
        kept, traffic = list(self._queue), self.traffic
        self._queue, self.traffic, self.is_recording = [], Traffic(), True
        try:
            work()
        finally:
            self._queue, self.traffic, self.is_recording = kept, traffic, False
        self.recorded.append(FakeRecording(self, work))
        return self.recorded[-1]

    def call(self) -> None:
        self.traffic.add("call")
        if not self.is_recording:
            self._drain()

    def close(self) -> None:
        self.is_closed = True

    def memory_of(self, array: DeviceArray) -> NDArray[np.uint8]:
        """Return the live memory after an array, which may be a part of an allocation."""
        for address, memory in self.live.items():
            if address <= array.memory < address + memory.nbytes:
                start = array.memory - address
                return memory[start : start + array.num_bytes]
        raise AssertionError(f"{array} is not allocated")

    def _rows_of(self, array: DeviceArray) -> NDArray[np.uint8]:
        """Return an array [..., rows, width] as (heads, rows, bytes of a row)."""
        return self.memory_of(array).reshape(
            -1, array.shape[-2], array.num_bytes // int(np.prod(array.shape[:-1]))
        )

    def _drain(self) -> None:
        for target, source in self._queue:
            target[:] = source
        self._queue.clear()


class FakeRecording:
    """A recorded graph of a device; it must not run after its memory was freed."""

    def __init__(self, device: FakeDevice, work: Callable[[], None]) -> None:
        self._device = device
        self._work: Callable[[], None] | None = work

    def run(self) -> None:
        assert self._work is not None
        self._device.traffic.add("replay")
        self._work()

    def free(self) -> None:
        self._work = None
        self._device.recorded.remove(self)


class FakeEngine:
    """A DeviceEngine over another one: it tells the device of every call.

    Attributes:
        bound: inputs and outputs of every call bound so far, by name.
        num_released: how many of them were released.
        is_closed: whether the engine was.
    """

    def __init__(
        self,
        inner: DeviceEngine,
        device: FakeDevice,
        *,
        capacity: int | None = None,
        before_call: Callable[[dict[str, DeviceArray]], None] = lambda arrays: None,
    ) -> None:
        """Wrap ``inner``.

        ``capacity`` is a static one. ``before_call`` sees what is bound and may raise.
        """
        self.inner = inner
        self.device = device
        self.capacity = capacity
        self.before_call = before_call
        self.bound: list[dict[str, DeviceArray]] = []
        self.num_released = 0
        self.is_closed = False

    def capacity_for(self, num_rows: int) -> int:
        if self.capacity is None:
            return self.inner.capacity_for(num_rows)
        if num_rows > self.capacity:
            raise CapacityError(f"{num_rows} rows, the engine holds {self.capacity}")
        return self.capacity

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> BoundCall:
        self.bound.append({**inputs, **outputs})
        return FakeCall(self, self.inner.bind(inputs, outputs), self.bound[-1])

    def close(self) -> None:
        self.inner.close()
        self.is_closed = True


class FakeCall:
    def __init__(
        self, engine: FakeEngine, inner: BoundCall, arrays: dict[str, DeviceArray]
    ) -> None:
        self._engine = engine
        self._inner = inner
        self._arrays = arrays

    def run(self) -> None:
        self._engine.device.call()
        if not self._engine.device.is_recording:
            self._engine.before_call(self._arrays)
            self._inner.run()

    def release(self) -> None:
        for array in self._arrays.values():
            self._engine.device.memory_of(array)  # still allocated
        self._inner.release()
        self._engine.num_released += 1


@dataclass(frozen=True)
class FakeMachine:
    """A model on a fake device, with everything that a test looks at."""

    device: FakeDevice
    engine: FakeEngine
    prune_engine: FakeEngine
    session: DeviceSession
    model: CausalLM


def open_on_fake(
    bundle: Bundle,
    role: str = "target",
    *,
    device: FakeDevice | None = None,
    most_recorded: int = 0,
    is_poisoned: bool = False,
    max_forward_rows: int = MAX_FORWARD_ROWS,
    **options: Any,
) -> FakeMachine:
    """Open a model of a bundle on a fake device; ``options`` are those of FakeEngine.

    With ``is_poisoned`` every step finds large values in all cache rows that it may not see.
    """
    device = device or FakeDevice()
    if is_poisoned:
        options["before_call"] = functools.partial(poison_unused_rows, device)
    engine, prune_engine = (
        FakeEngine(
            OrtEngine(ort, cpu_session(path, num_threads=1), path, device_type="cpu"),
            device,
            **options,
        )
        for path in (bundle.model_path(role), bundle.prune_path(role))
    )
    entry = bundle.entry(role)
    session = DeviceSession(
        LoadedModel(device, engine, prune_engine, entry, max_forward_rows, most_recorded)
    )
    return FakeMachine(device, engine, prune_engine, session, CausalLM(session, entry))


def poison_unused_rows(device: FakeDevice, arrays: dict[str, DeviceArray]) -> None:
    """Overwrite the rows of fp32 caches from the first row of a step on."""
    if INPUT_IDS not in arrays:
        return
    first_row = device.memory_of(arrays[WRITE_INDICES]).view(np.int64)[0]
    for array in arrays.values():
        if len(array.shape) == CACHE_DIMS and array.dtype == "fp32":
            device.memory_of(array).view(np.float32).reshape(array.shape)[:, :, first_row:] = POISON
