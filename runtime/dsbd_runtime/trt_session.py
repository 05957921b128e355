"""Open a bundle's TensorRT engines as a DeviceSession."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dsbd_runtime.bound_caches import LoadedModel
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.cuda_device import CudaDevice, import_cuda_runtime
from dsbd_runtime.device_session import DeviceSession
from dsbd_runtime.errors import BundleError
from dsbd_runtime.providers import Provider, check_dtype
from dsbd_runtime.trt_engine import TrtEngine
from dsbd_runtime.trt_fit import TrtMachine, fitting_record, gpu_compute_capability
from dsbd_runtime.trt_log import first_reason, trt_logger
from dsbd_runtime.trt_module import FLAVOURS, import_trt
from dsbd_runtime.trt_record import ENGINE_FILE, PRUNE_ENGINE_FILE


def open_trt_session(
    bundle: Bundle,
    role: str,
    provider: Provider,
    *,
    device_id: int,
    max_step_rows: int,
    trt: ModuleType | None = None,
    cuda_runtime: Any = None,
) -> DeviceSession:
    """Open the engine of "target" or "draft" and its prune engine on one GPU.

    Args:
        bundle: from ``open_bundle``.
        role: "target" or "draft".
        provider: the row "tensorrt" or "tensorrt-rtx" of the table.
        device_id: number of the GPU.
        max_step_rows: the most rows of one step.
        trt: the module tensorrt or tensorrt_rtx; None imports the provider's.
        cuda_runtime: the module cuda.bindings.runtime; None imports it.

    Raises:
        BundleError: there is no engine, or it does not fit this machine; the message has the
            command that builds one.
        ProviderError: package, driver or device is missing; the message says which.
        CapacityError: the GPU has no memory for the caches.
    """
    check_dtype(provider, bundle.entry(role), bundle.model_path(role))
    flavour = FLAVOURS[provider.name]
    trt = import_trt(flavour) if trt is None else trt
    if cuda_runtime is None:
        cuda_runtime = import_cuda_runtime(provider.install_line)
    device = CudaDevice(device_id, cuda_runtime)
    try:
        machine = TrtMachine(
            tensorrt_version=trt.__version__,
            compute_capability=gpu_compute_capability(cuda_runtime, device_id),
        )
        record = fitting_record(bundle, role, flavour, machine)
        folder, entry = bundle.path / role, bundle.entry(role)
        engine, prune_engine = (
            open_engine(
                trt,
                folder / file,
                num_layers=entry.kv.num_layers,
                capacity=record.capacity,
                profiles=profiles,
                stream=device.stream,
            )
            for file, profiles in (
                (ENGINE_FILE, record.step_profiles),
                (PRUNE_ENGINE_FILE, record.move_profiles),
            )
        )
        return DeviceSession(LoadedModel(device, engine, prune_engine, entry, max_step_rows))
    except BaseException:
        device.close()
        raise


def open_engine(
    trt: ModuleType,
    path: Path,
    *,
    num_layers: int,
    capacity: int,
    profiles: list[int],
    stream: int,
) -> TrtEngine:
    """Deserialize a plan on the device that is current; see ``TrtEngine`` for the arguments."""
    errors: list[str] = []
    runtime = trt.Runtime(trt_logger(trt, errors))
    plan = runtime.deserialize_cuda_engine(np.memmap(path, mode="r"))
    if plan is None:
        raise BundleError(
            f"TensorRT {trt.__version__} cannot load {path} ({first_reason(errors)}); "
            "copy the bundle, or build its engines again with dsbd-export --bundle"
        )
    return TrtEngine(
        plan,
        path,
        num_layers=num_layers,
        capacity=capacity,
        profiles=profiles,
        stream=stream,
        errors=errors,
    )
