"""Open a bundle's model as a DeviceSession on ONNX Runtime's CUDA provider."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import ModuleType
from typing import Any

from dsbd_runtime.bound_caches import LoadedModel
from dsbd_runtime.cuda_device import CudaDevice, import_cuda_runtime
from dsbd_runtime.device_session import DeviceSession
from dsbd_runtime.errors import BundleError, ProviderError
from dsbd_runtime.graph_check import check_graph
from dsbd_runtime.manifest import ModelEntry
from dsbd_runtime.ort_device_engine import OrtDeviceEngine
from dsbd_runtime.providers import Provider, check_dtype, import_onnxruntime

_LOG_ERRORS = 3
_NO_FALLBACK = {"session.disable_cpu_ep_fallback": "1"}
_FALLBACK_REFUSED = "fallback to CPU EP has been explicitly disabled"
_RECORD_NODES = {"session.record_ep_graph_assignment_info": "1"}


def open_cuda_session(
    provider: Provider,
    model_path: Path,
    prune_path: Path,
    entry: ModelEntry,
    *,
    device_id: int,
    max_step_rows: int,
    captures_graphs: bool,
) -> DeviceSession:
    """Open a model and its prune graph on one GPU.

    Args:
        provider: the row "cuda" of the table.
        model_path: the ONNX file of the model, external data beside it.
        prune_path: the ONNX file of its prune graph.
        entry: what the manifest says of the model; a contradiction is a BundleError.
        device_id: number of the GPU.
        max_step_rows: the most rows of one step.
        captures_graphs: replay a CUDA graph for every size of call.

    Raises:
        ProviderError: package, driver, library or device is missing; the message says which.
        CapacityError: the GPU has no memory for the smallest caches.
    """
    check_dtype(provider, entry, model_path)
    ort = import_onnxruntime(provider)
    device = CudaDevice(device_id, import_cuda_runtime(provider.install_line))
    try:
        libraries = preload_libraries(ort)
        options = cuda_options(device, captures_graphs)
        model, prune = (
            open_on_provider(ort, path, provider, options, libraries)
            for path in (model_path, prune_path)
        )
        check_graph(model_path, entry, model.get_inputs(), model.get_outputs())
    except BaseException:
        device.close()
        raise
    engine, prune_engine = (
        OrtDeviceEngine(
            ort,
            session,
            path,
            device_type="cuda",
            device_id=device_id,
            captures_graphs=captures_graphs,
        )
        for session, path in ((model, model_path), (prune, prune_path))
    )
    return DeviceSession(LoadedModel(device, engine, prune_engine, entry, max_step_rows))


def cuda_options(device: CudaDevice, captures_graphs: bool) -> dict[str, str]:
    """Return the options of the provider: the device, its queue, and whether graphs are captured.

    The memory of what lies between inputs and outputs grows as asked, not to the next power of
    two: the caches need the room. By default ONNX Runtime multiplies fp32 matrices in TF32, with
    10 bits of mantissa: an fp32 bundle would not give the CPU's tokens.
    """
    return {
        "device_id": str(device.device_id),
        "user_compute_stream": str(device.stream),
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "1" if captures_graphs else "0",
        "use_tf32": "0",
    }


def preload_libraries(ort: ModuleType) -> str:
    """Load the CUDA libraries that pip has installed; return in one line which are missing.

    ONNX Runtime prints what it cannot load and goes on; it is the reason when the provider is
    missing from a session afterwards.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls()
    return " ".join(printed.getvalue().split())


def open_on_provider(
    ort: ModuleType, path: Path, provider: Provider, options: dict[str, str], libraries: str
) -> Any:
    """Return an InferenceSession of which every node runs on the provider.

    By itself ONNX Runtime falls back to the CPU, for the whole graph or for single nodes, with no
    more than a line in its log. ``libraries`` is what ``preload_libraries`` returned.
    """
    try:
        return _open(ort, path, provider, options, _NO_FALLBACK)
    except Exception as error:  # its exceptions share no base but this one
        reason = " ".join(str(error).split())
        if _FALLBACK_REFUSED in reason:
            raise _fallback_error(ort, path, provider, options, libraries) from error
        raise BundleError(
            f"ONNX Runtime cannot load {path} on {provider.name} ({reason}); "
            "copy the bundle or export again"
        ) from error


def _fallback_error(
    ort: ModuleType, path: Path, provider: Provider, options: dict[str, str], libraries: str
) -> ProviderError:
    """Return why nodes would run on the CPU: all because the provider is out, or single ones."""
    session = _open(ort, path, provider, options, _RECORD_NODES)
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
        f"{', '.join(sorted(on_cpu))}; use provider 'cpu', or export with another --dtype or "
        "--quantize"
    )


def _open(
    ort: ModuleType,
    path: Path,
    provider: Provider,
    options: dict[str, str],
    entries: dict[str, str],
) -> Any:
    settings = ort.SessionOptions()
    settings.log_severity_level = _LOG_ERRORS
    for name, value in entries.items():
        settings.add_session_config_entry(name, value)
    return ort.InferenceSession(
        str(path), settings, providers=[(provider.ort_name, options)], enable_fallback=False
    )
