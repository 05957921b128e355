"""Device on the CUDA runtime: plain allocations, pinned memory and one stream.

The small inputs or outputs of a call are packed: they are one after the other in pinned memory and
in device memory, and a single copy moves them.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.devices import ELEMENT_BYTES, DeviceArray, PackedPart
from dsbd_runtime.errors import EngineError, ProviderError

_ALIGNMENT = 256  # as cudaMalloc: addresses are aligned like those of separate arrays
_NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "int64": np.int64,
    "bool": np.bool_,
}

_log = logging.getLogger(__name__)


def import_cuda_runtime(install_line: str) -> Any:
    """Return the module cuda.bindings.runtime; raise ProviderError with ``install_line``."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ProviderError(
            f"the package cuda-bindings cannot be imported ({error}); {install_line}"
        ) from error


def check_cuda_device(runtime: Any, device_id: int) -> None:
    """Raise ProviderError if the driver or the device is missing."""
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess:
        raise ProviderError(
            f"no CUDA device can be used: {_reason(runtime, status)}; install an NVIDIA driver for "
            "CUDA 13 (580 or newer), and in a container pass the device in (docker run --gpus all)"
        )
    if not 0 <= device_id < count:
        raise ProviderError(
            f"there is no device cuda:{device_id}, this machine has {count}; choose cuda:0"
            + (f" to cuda:{count - 1}" if count > 1 else "")
        )


def gpu_compute_capability(runtime: Any, device_id: int) -> str | None:
    """Return the compute capability of a GPU, such as "9.0"; None for an absent GPU."""
    attributes = runtime.cudaDeviceAttr
    numbers = []
    for attribute in (
        attributes.cudaDevAttrComputeCapabilityMajor,
        attributes.cudaDevAttrComputeCapabilityMinor,
    ):
        status, number = runtime.cudaDeviceGetAttribute(attribute, device_id)
        if status != runtime.cudaError_t.cudaSuccess:
            return None
        numbers.append(number)
    return ".".join(map(str, numbers))


class CudaDevice:
    """One GPU; all work is queued on its stream at the address ``stream``."""

    def __init__(self, device_id: int, runtime: Any) -> None:
        """Open the device; raise ProviderError if the driver or the device is missing."""
        check_cuda_device(runtime, device_id)
        self.name = f"cuda:{device_id}"
        self.device_id = device_id
        self._runtime = runtime
        self.num_waits = 0
        self._is_open = True
        self._has_failed = False  # whether an error was raised
        handle = self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.stream = int(handle)

    def free_bytes(self) -> int:
        free, _ = self._results("cudaMemGetInfo")
        return int(free)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * ELEMENT_BYTES[dtype]
        array = DeviceArray(int(self._call("cudaMalloc", num_bytes)), shape, dtype)
        self.fill_zero(array)
        return array

    def free(self, array: DeviceArray) -> None:
        self._release("cudaFree", array.memory)

    def staging(self, parts: Sequence[PackedPart]) -> PackedBuffer:
        return PackedBuffer(self, packed_bytes(parts))

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        address = int(self._call("cudaMallocHost", num_bytes))
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def free_pinned(self, buffer: NDArray[np.uint8]) -> None:
        self._release("cudaStreamSynchronize", self.stream)
        self._release("cudaFreeHost", buffer.ctypes.data)

    def upload(self, source: NDArray[np.uint8], target: DeviceArray) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        address = source.ctypes.data
        self._call("cudaMemcpyAsync", target.memory, address, source.nbytes, kind, self.stream)

    def download(self, source: DeviceArray, target: NDArray[np.uint8]) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        address = target.ctypes.data
        self._call("cudaMemcpyAsync", address, source.memory, target.nbytes, kind, self.stream)

    def copy_rows(
        self,
        source: DeviceArray,
        target: DeviceArray,
        num_rows: int,
        source_row: int = 0,
        target_row: int = 0,
    ) -> None:
        *heads, num_source, width = source.shape
        row_bytes = width * ELEMENT_BYTES[source.dtype]
        self._call(
            "cudaMemcpy2DAsync",
            target.memory + target_row * row_bytes,
            target.shape[-2] * row_bytes,
            source.memory + source_row * row_bytes,
            num_source * row_bytes,
            num_rows * row_bytes,
            math.prod(heads),
            self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
            self.stream,
        )

    def fill_zero(self, array: DeviceArray) -> None:
        self._call("cudaMemsetAsync", array.memory, 0, array.num_bytes, self.stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)
        self.num_waits += 1

    def record(self, work: Callable[[], None]) -> RecordedGraph:
        """Return the queued work as a CUDA graph; other threads may allocate meanwhile."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            _, graph = self._runtime.cudaStreamEndCapture(self.stream)  # this fails as well
            if graph is not None and int(graph):
                self._release("cudaGraphDestroy", graph)
            raise
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            executable = self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._release("cudaGraphDestroy", graph)
        return RecordedGraph(
            partial(self._call, "cudaGraphLaunch", executable, self.stream),
            partial(self._release, "cudaGraphExecDestroy", executable),
        )

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._release("cudaStreamDestroy", self.stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call the runtime with this device set in the thread; return the first result or None."""
        results = self._results(function, *arguments)
        return results[0] if results else None

    def _results(self, function: str, *arguments: Any) -> list[Any]:
        self._checked("cudaSetDevice", self.device_id)
        return self._checked(function, *arguments)

    def _release(self, function: str, *arguments: Any) -> None:
        """Call a function that frees something; errors are only logged.

        After a kernel has failed, every CUDA call returns that error, which was raised before.
        """
        has_failed = self._has_failed
        try:
            self._call(function, *arguments)
        except (EngineError, MemoryError) as error:
            _log.log(logging.DEBUG if has_failed else logging.WARNING, "%s", error)

    def _checked(self, function: str, *arguments: Any) -> list[Any]:
        results: list[Any]
        status, *results = getattr(self._runtime, function)(*arguments)
        errors = self._runtime.cudaError_t
        if status != errors.cudaSuccess:
            self._runtime.cudaGetLastError()  # clear it, or the next kernel reports it
        if status == errors.cudaErrorMemoryAllocation:
            raise MemoryError(f"{self.name}: {function}{arguments}")
        if status != errors.cudaSuccess:
            self._has_failed = True
            reason = _reason(self._runtime, status)
            raise EngineError(
                f"{function} on {self.name} failed: {reason}; start the process again, because "
                "CUDA refuses all work after a kernel has failed"
            )
        return results


@dataclass(frozen=True)
class RecordedGraph:
    """An executable CUDA graph, as functions that launch and destroy it."""

    run: Callable[[], None]
    free: Callable[[], None]


def _reason(runtime: Any, status: Any) -> str:
    _, text = runtime.cudaGetErrorString(status)
    return f"{text.decode()} ({getattr(status, 'name', status)})"


@dataclass(frozen=True)
class PackedArrays:
    """Arrays by name, one after the other in the first ``num_bytes`` of a ``PackedBuffer``."""

    buffer: PackedBuffer
    on_host: dict[str, NDArray[Any]]
    on_device: dict[str, DeviceArray]
    num_bytes: int

    def upload(self) -> None:
        self.buffer.upload(self.num_bytes)

    def download(self, num_rows: int) -> None:
        last = next(reversed(self.on_host.values()))
        self.buffer.download(self.num_bytes - last[num_rows:].nbytes)


class PackedBuffer:
    """Pinned and device memory of one size: a ``Staging``."""

    def __init__(self, device: CudaDevice, num_bytes: int) -> None:
        """Allocate both memories; without room raise MemoryError, with nothing left allocated."""
        self._device = device
        self._written_at = -1  # ``num_waits`` of the device at the last write
        self._memory = device.allocate((num_bytes,), "uint8")
        try:
            self._pinned = device.allocate_pinned(num_bytes)
        except MemoryError:
            device.free(self._memory)
            raise

    def lay_out(self, parts: Sequence[PackedPart]) -> PackedArrays:
        """Return arrays of these parts, in this order; they share memory with other layouts."""
        on_host: dict[str, NDArray[Any]] = {}
        on_device: dict[str, DeviceArray] = {}
        for (name, shape, dtype), (start, stop) in zip(parts, _extents(parts), strict=True):
            on_host[name] = self._pinned[start:stop].view(_NUMPY_DTYPES[dtype]).reshape(shape)
            on_device[name] = DeviceArray(self._memory.memory + start, shape, dtype)
        return PackedArrays(self, on_host, on_device, packed_bytes(parts))

    def begin_write(self) -> None:
        """Wait until the device has read the last write, before the host writes again."""
        if self._written_at == self._device.num_waits:
            self._device.synchronize()
        self._written_at = self._device.num_waits

    def upload(self, num_bytes: int) -> None:
        self._device.upload(self._pinned[:num_bytes], self._memory)

    def download(self, num_bytes: int) -> None:
        self._device.download(self._memory, self._pinned[:num_bytes])

    def free(self) -> None:
        self._device.free(self._memory)
        self._device.free_pinned(self._pinned)


def packed_bytes(parts: Sequence[PackedPart]) -> int:
    """Return the bytes from the start of the first part to the end of the last."""
    return _extents(parts)[-1][1]


def _extents(parts: Sequence[PackedPart]) -> list[tuple[int, int]]:
    extents, stop = [], 0
    for _, shape, dtype in parts:
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + math.prod(shape) * ELEMENT_BYTES[dtype]
        extents.append((start, stop))
    return extents
