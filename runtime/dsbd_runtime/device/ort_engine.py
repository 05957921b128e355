"""Engine of a DeviceSession on ONNX Runtime's CUDA provider, its graphs bound by address."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dsbd_runtime.bundle_files.bundle import MODEL_FILE, WEIGHTS_FILE
from dsbd_runtime.device.bound_calls import MOST_RECORDED, LoadedModel
from dsbd_runtime.device.cuda_device import CudaDevice, import_cuda_runtime
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.engine.providers import Provider, check_runnable
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.errors import BundleError, CapacityError, EngineError, ProviderError
from dsbd_runtime.ort.ort_module import LOG_ERRORS, import_ort_for
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.parts.attention.kv_cache import bucket_capacity
from dsbd_runtime.parts.graph_check import check_graph

_NO_FALLBACK = {"session.disable_cpu_ep_fallback": "1"}
_INTEGER_PRODUCTS = {"ep.cuda.fpa_intb_gemm": "1"}  # fp16 rows times integer weights
_FALLBACK_REFUSED = (
    "fallback to CPU EP has been explicitly disabled",
    "all compute graph nodes have not been partitioned",  # with graphs of a plug-in
)
GRAPH_CAPTURE = "enableGraphCapture"  # a plug-in's option, which requires that it runs every node
_NO_ADAPTER = "Failed to get a WebGPU adapter"
_NO_WAIT = ("disable_synchronize_execution_providers", "1")  # DeviceSession waits, once a forward
_RECORD_NODES = {"session.record_ep_graph_assignment_info": "1"}

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16, a type that numpy has no name for
_ELEMENT_TYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": _ONNX_BFLOAT16,
    "int64": np.int64,
    "bool": np.bool_,
}
_OF_A_LIBRARY = re.compile(r"CUDNN|CUBLAS|CUDA (failure|error)|lib(cu|nv)\w+\.so", re.IGNORECASE)
_NO_MEMORY = ("Failed to allocate memory", "out of memory", "smaller than requested bytes")


def open_cuda_session(request: EngineOptions) -> DeviceSession:
    """Open the engine of "target" or "draft" and its prune graph on one GPU.

    Raises:
        BundleError: a graph is damaged or contradicts the manifest.
        ProviderError: package, driver, library or device is missing; the message says which.
        CapacityError: the GPU has no memory for the smallest caches.
    """
    bundle, role, placement = request.bundle, request.role, request.placement
    provider, entry = placement.provider, bundle.entry(role)
    paths = bundle.model_path(role), bundle.prune_path(role)
    check_runnable(provider, entry, paths[0])
    ort = import_ort_for(provider)
    device = CudaDevice(placement.device_id, import_cuda_runtime(provider.install_line))
    try:
        libraries = preload_libraries(ort)
        options = cuda_options(device)
        graph, prune = (
            open_on_provider(ort, path, provider, options, libraries, device.free_bytes)
            for path in paths
        )
        check_graph(paths[0], entry.contract, graph)
    except BaseException:
        device.close()
        raise
    engine, prune_engine = (
        OrtEngine(ort, session, path, device_type="cuda", device_id=placement.device_id)
        for session, path in zip((graph, prune), paths, strict=True)
    )
    most_recorded = MOST_RECORDED if request.records_calls else 0
    model = LoadedModel(device, engine, prune_engine, entry, MAX_FORWARD_ROWS, most_recorded)
    return DeviceSession(replace(model, grows_by_moves=reads_sources(prune)))


def reads_sources(prune: Any) -> bool:
    """Return whether a prune graph copies rows from other caches, as in WebGPU's form."""
    return any(each.name.startswith("source.") for each in prune.get_inputs())


def cuda_options(device: CudaDevice) -> dict[str, str]:
    """Return the options of the provider, with the device and its queue.

    ONNX Runtime's CUDA graphs are off: each belongs to one thread and one size, and its first call
    runs several times (``bound_calls`` replaces them). The memory for intermediate results grows
    only as needed, not to the next power of two, because the caches need the room. TF32 is off: it
    has 10 bits of mantissa, so that an fp32 bundle would not give the CPU's tokens. Attention is
    computed as two products and a softmax: a mask excludes the flash kernel, and the other fused
    kernel first copies the keys and values of shared heads.
    """
    return {
        "device_id": str(device.device_id),
        "user_compute_stream": str(device.stream),
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "0",
        "use_tf32": "0",
        "sdpa_kernel": "16",  # AttentionBackend::MATH
    }


def preload_libraries(ort: ModuleType) -> str:
    """Load the CUDA libraries that pip has installed; return one line on those that are missing.

    ONNX Runtime only prints them and continues, but sessions then lack the provider.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls()
    return " ".join(printed.getvalue().split())


def open_on_provider(
    ort: ModuleType,
    path: Path,
    provider: Provider,
    options: dict[str, str],
    libraries: str = "",
    free_bytes: Callable[[], int] = lambda: 0,
    plugin_device: Any = None,
) -> Any:
    """Return an InferenceSession that runs every node on the provider.

    By default ONNX Runtime falls back to the CPU, for the whole graph or for single nodes, with
    only a line in its log.

    libraries: result of ``preload_libraries``.
    free_bytes: returns the free memory of the device.
    plugin_device: the device of a plug-in; None for other providers.
    """
    num_free = free_bytes()
    entries = {**_NO_FALLBACK, **_INTEGER_PRODUCTS}
    try:
        return _open(ort, path, provider, options, plugin_device, entries)
    except Exception as error:  # ONNX Runtime's exceptions have no other common base
        reason = " ".join(str(error).split())
        if any(sign in reason for sign in _FALLBACK_REFUSED):
            options = {key: each for key, each in options.items() if key != GRAPH_CAPTURE}
            session = _open(ort, path, provider, options, plugin_device, _RECORD_NODES)
            raise _fallback_error(session, path, provider, libraries) from error
        if _NO_ADAPTER in reason:
            raise ProviderError(
                f"provider {provider.name!r} finds no adapter that it can use ({reason}); install "
                "the GPU's driver, or use provider 'cpu'"
            ) from error
        if any(sign in reason for sign in _NO_MEMORY):
            raise CapacityError(
                f"no memory on {provider.name}:{options['device_id']} for {path}, which takes "
                f"{_engine_bytes(path):,} bytes plus what ONNX Runtime packs; "
                f"{num_free:,} bytes were free; close other programs that use the device, or "
                "export with --quantize or a shorter --dtype"
            ) from error
        if _OF_A_LIBRARY.search(reason):
            raise ProviderError(
                f"a CUDA library fails when ONNX Runtime opens {path} on {provider.name} "
                f"({reason}{', ' + libraries if libraries else ''}); {provider.install_line}"
            ) from error
        raise BundleError(
            f"ONNX Runtime cannot load {path} on {provider.name} ({reason}); "
            "copy the bundle or export again"
        ) from error


def _engine_bytes(path: Path) -> int:
    weights = path.with_name(WEIGHTS_FILE)
    has_weights = path.name == MODEL_FILE and weights.is_file()
    return path.stat().st_size + (weights.stat().st_size if has_weights else 0)


def _fallback_error(session: Any, path: Path, provider: Provider, libraries: str) -> ProviderError:
    """Return the error for a graph whose nodes would run on the CPU, all (no provider) or some."""
    if provider.ort_name not in session.get_providers():
        missing = libraries or "a library of its own did not load, see ONNX Runtime's log on stderr"
        return ProviderError(
            f"ONNX Runtime opens {path} without {provider.ort_name}: {missing}; "
            f"{provider.install_line}"
        )
    on_cpu = {
        node.op_type
        for subgraph in session.get_provider_graph_assignment_info()
        if subgraph.ep_name != provider.ort_name
        for node in subgraph.get_nodes()
    }
    return ProviderError(
        f"{provider.ort_name} does not run every node of {path}, the CPU would run "
        f"{', '.join(sorted(on_cpu))}; use provider 'cpu', or export with "
        "another --dtype or --quantize"
    )


def _open(
    ort: ModuleType,
    path: Path,
    provider: Provider,
    options: dict[str, str],
    plugin_device: Any,
    entries: dict[str, str],
) -> Any:
    settings = ort.SessionOptions()
    settings.log_severity_level = LOG_ERRORS
    # A memory pattern would allocate at the second call of a size, which is recorded. Without
    # patterns the arena is also smaller.
    settings.enable_mem_pattern = False
    for name, value in entries.items():
        settings.add_session_config_entry(name, value)
    if plugin_device is None:
        providers = [(provider.ort_name, options)]
    else:
        providers = None
        settings.add_provider_for_devices([plugin_device], options)
    return ort.InferenceSession(str(path), settings, providers=providers, enable_fallback=False)


class OrtEngine:
    """One graph in an ONNX Runtime session on ``device_type``."""

    def __init__(
        self, ort: ModuleType, session: Any, path: Path, *, device_type: str, device_id: int = 0
    ) -> None:
        self._ort = ort
        self._session = session
        self._path = path
        self._place = (device_type, device_id)

    def capacity_for(self, num_rows: int) -> int:
        return bucket_capacity(num_rows)

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> OrtCall:
        binding = self._opened().io_binding()
        for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in arrays.items():
                element_type = _ELEMENT_TYPES[array.dtype]
                bind(name, *self._place, element_type, array.shape, array.memory)
        options = self._ort.RunOptions()
        options.add_run_config_entry(*_NO_WAIT)
        return OrtCall(self._path, self._session, binding, options)

    def _opened(self) -> Any:
        if self._session is None:
            raise EngineError(f"the engine {self._path} is closed; load it again")
        return self._session

    def close(self) -> None:
        self._session = None


@dataclass(eq=False)
class OrtCall:
    """A graph bound to device memory."""

    path: Path
    session: Any
    binding: Any
    options: Any

    def run(self) -> None:
        """Queue the graph; CapacityError: the device has no memory, EngineError: it failed."""
        try:
            self.session.run_with_iobinding(self.binding, self.options)
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            reason = " ".join(str(error).split())
            if not any(sign in reason for sign in _NO_MEMORY):
                again = "start the process" if "CUDA failure" in reason else "open the bundle"
                raise EngineError(
                    f"ONNX Runtime failed in a call of {self.path}: {reason}; "
                    f"{again} again, or export it again if that does not help"
                ) from error
            raise CapacityError(
                f"no memory for the intermediate results of a call ({reason}); "
                "ask for fewer beams or a shorter draft, or close other programs on the device"
            ) from error

    def release(self) -> None:
        self.session = self.binding = None
