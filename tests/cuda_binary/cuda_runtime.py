"""cuda.bindings.runtime over the stand-in: its functions through ctypes, its enums as they are."""

import ctypes
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_ADDRESS, _SIZE, _INT, _UNSIGNED = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint

_RESULTS: dict[str, tuple[type[Any], ...]] = {
    "cudaGetDeviceCount": (_INT,),
    "cudaDeviceGetAttribute": (_INT,),
    "cudaStreamCreateWithFlags": (_ADDRESS,),
    "cudaMalloc": (_ADDRESS,),
    "cudaMallocHost": (_ADDRESS,),
    "cudaMemGetInfo": (_SIZE, _SIZE),
    "cudaGraphInstantiate": (_ADDRESS,),
    "cudaStreamEndCapture": (_ADDRESS,),
}
"""Values that a function writes to its first parameters, cudaStreamEndCapture to its last."""

_ARGUMENTS: dict[str, tuple[type[Any], ...]] = {
    "cudaGetDeviceCount": (),
    "cudaDeviceGetAttribute": (_INT, _INT),
    "cudaSetDevice": (_INT,),
    "cudaStreamCreateWithFlags": (_UNSIGNED,),
    "cudaStreamDestroy": (_ADDRESS,),
    "cudaStreamSynchronize": (_ADDRESS,),
    "cudaMalloc": (_SIZE,),
    "cudaMallocHost": (_SIZE,),
    "cudaMemGetInfo": (),
    "cudaFree": (_ADDRESS,),
    "cudaFreeHost": (_ADDRESS,),
    "cudaMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _INT, _ADDRESS),
    "cudaMemcpy2DAsync": (_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _SIZE, _INT, _ADDRESS),
    "cudaMemsetAsync": (_ADDRESS, _INT, _SIZE, _ADDRESS),
    "cudaGetLastError": (),
    "cudaStreamBeginCapture": (_ADDRESS, _INT),
    "cudaStreamEndCapture": (_ADDRESS,),
    "cudaGraphInstantiate": (_ADDRESS, ctypes.c_ulonglong),
    "cudaGraphLaunch": (_ADDRESS, _ADDRESS),
    "cudaGraphDestroy": (_ADDRESS,),
    "cudaGraphExecDestroy": (_ADDRESS,),
}


class StandIn:
    """The stand-in of this process: what it has recorded, and how it fails."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcudart.so.13")
        for name, kind in (("standin_take_log", ctypes.c_char_p), ("standin_used_memory", _SIZE)):
            getattr(self.library, name).restype = kind
        for name in ("standin_num_captures", "standin_num_graphs"):
            getattr(self.library, name).restype = _SIZE

    def take_log(self) -> list[str]:
        """Return what was done since the last time, a line each."""
        return self.library.standin_take_log().decode().splitlines()

    @property
    def used_memory(self) -> int:
        """Bytes of device memory that are taken."""
        return int(self.library.standin_used_memory())

    @property
    def num_captures(self) -> int:
        """Streams that are being captured."""
        return int(self.library.standin_num_captures())

    @property
    def num_graphs(self) -> int:
        """Graphs, executable or not, that were not destroyed."""
        return int(self.library.standin_num_graphs())

    def limit_memory(self, num_bytes: int) -> None:
        """Let the device have so much memory from now on."""
        self.library.standin_limit_memory(_SIZE(num_bytes))

    def fail_kernels(self, part_of_name: str) -> None:
        """Let kernels of this name fail; every call after one fails too, as on a GPU."""
        self.library.standin_fail_kernels(part_of_name.encode())

    def recover(self) -> None:
        """Forget failures and captures, as a new process would."""
        self.library.standin_recover()


def put_in_place(stand_in: StandIn) -> None:
    """Let ``import cuda.bindings.runtime`` return the functions of the stand-in."""
    real = importlib.import_module("cuda.bindings.runtime")
    module = ModuleType("cuda.bindings.runtime")
    module.__getattr__ = lambda name: getattr(real, name)  # type: ignore[method-assign]
    status_of = real.cudaError_t
    for name in _ARGUMENTS:
        setattr(module, name, _function(stand_in.library, name, status_of))
    module.cudaGetErrorString = lambda status: (  # type: ignore[attr-defined]
        status_of.cudaSuccess,
        _text(stand_in.library.cudaGetErrorString, int(status)),
    )
    sys.modules["cuda.bindings.runtime"] = module
    sys.modules["cuda.bindings"].runtime = module  # type: ignore[attr-defined]


def _text(function: Any, status: int) -> bytes:
    function.restype = ctypes.c_char_p
    return bytes(function(status))


def _function(library: ctypes.CDLL, name: str, status_of: Any) -> Callable[..., tuple[Any, ...]]:
    function, kinds, results = getattr(library, name), _ARGUMENTS[name], _RESULTS.get(name, ())

    def call(*given: Any) -> tuple[Any, ...]:
        arguments = [kind(int(value)) for kind, value in zip(kinds, given, strict=True)]
        places = [kind() for kind in results]
        pointers = [ctypes.byref(place) for place in places]
        is_last = name == "cudaStreamEndCapture"
        ordered = [*arguments, *pointers] if is_last else [*pointers, *arguments]
        status = function(*ordered)
        return (status_of(status), *(None if status else place.value or 0 for place in places))

    return call
