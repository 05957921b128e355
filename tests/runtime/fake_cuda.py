"""The functions of cuda.bindings.runtime that a CudaDevice calls, over host memory."""

import ctypes
from enum import IntEnum
from typing import Any

import numpy as np


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class FakeCudaRuntime:
    """Every function returns a tuple that begins with the status, as in cuda.bindings.

    Attributes:
        log: (function, arguments) of every call.
        fails: by function, the status that it returns.
        live: by address, what was allocated and not freed.
    """

    cudaError_t = cudaError_t
    cudaMemcpyKind = cudaMemcpyKind
    cudaStreamCaptureMode = cudaStreamCaptureMode
    cudaStreamNonBlocking = 1

    def __init__(self, num_devices: int = 2) -> None:
        self.num_devices = num_devices
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.fails: dict[str, cudaError_t] = {}
        self.live: dict[int, np.ndarray] = {}
        self.streams: list[int] = []
        self.graphs: list[int] = []  # recorded or executable, and not destroyed

    def cudaGetErrorString(self, status: cudaError_t) -> tuple[cudaError_t, bytes]:
        return cudaError_t.cudaSuccess, b"what CUDA says"

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return self._done("cudaGetDeviceCount", (), self.num_devices)

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return self._done("cudaSetDevice", (device,))

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        self.streams.append(1000 + len(self.log))
        return self._done("cudaStreamCreateWithFlags", (flags,), self.streams[-1])

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.streams.remove(stream)
        return self._done("cudaStreamDestroy", (stream,))

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self._done("cudaStreamSynchronize", (stream,))

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        return self._done("cudaMemGetInfo", (), 1000, 2000)

    def cudaGetLastError(self) -> tuple[Any, ...]:
        return self._done("cudaGetLastError", ())

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        return self._done("cudaStreamBeginCapture", (stream, mode))

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        return self._new_graph("cudaStreamEndCapture", stream)

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        assert graph in self.graphs
        return self._new_graph("cudaGraphInstantiate", graph, flags)

    def cudaGraphLaunch(self, executable: int, stream: int) -> tuple[Any, ...]:
        assert executable in self.graphs
        return self._done("cudaGraphLaunch", (executable, stream))

    def cudaGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        self.graphs.remove(graph)
        return self._done("cudaGraphDestroy", (graph,))

    def cudaGraphExecDestroy(self, executable: int) -> tuple[Any, ...]:
        self.graphs.remove(executable)
        return self._done("cudaGraphExecDestroy", (executable,))

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        return self._allocated("cudaMalloc", size)

    def cudaMallocHost(self, size: int) -> tuple[Any, ...]:
        return self._allocated("cudaMallocHost", size)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        del self.live[address]
        return self._done("cudaFree", (address,))

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.live[address]
        return self._done("cudaFreeHost", (address,))

    def cudaMemcpyAsync(
        self, target: int, source: int, count: int, kind: cudaMemcpyKind, stream: int
    ) -> tuple[Any, ...]:
        assert stream in self.streams
        ctypes.memmove(target, source, count)
        return self._done("cudaMemcpyAsync", (count, kind))

    def cudaMemcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: cudaMemcpyKind,
        stream: int,
    ) -> tuple[Any, ...]:
        assert stream in self.streams
        for line in range(height):
            ctypes.memmove(target + line * target_pitch, source + line * source_pitch, width)
        return self._done("cudaMemcpy2DAsync", (width, height, kind))

    def cudaMemsetAsync(self, target: int, value: int, count: int, stream: int) -> tuple[Any, ...]:
        assert stream in self.streams
        ctypes.memset(target, value, count)
        return self._done("cudaMemsetAsync", (value, count))

    def _new_graph(self, name: str, *arguments: int) -> tuple[Any, ...]:
        answer = self._done(name, arguments, 5000 + len(self.log))
        if answer[0] == cudaError_t.cudaSuccess:
            self.graphs.append(answer[1])
        return answer

    def _allocated(self, name: str, size: int) -> tuple[Any, ...]:
        memory = np.full(size, 0x7F, np.uint8)
        answer = self._done(name, (size,), memory.ctypes.data)
        if answer[0] == cudaError_t.cudaSuccess:
            self.live[memory.ctypes.data] = memory
        return answer

    def _done(self, name: str, arguments: tuple[Any, ...], *results: Any) -> tuple[Any, ...]:
        self.log.append((name, arguments))
        status = self.fails.get(name, cudaError_t.cudaSuccess)
        return (status, *results) if status == 0 else (status, *(0 for _ in results))
