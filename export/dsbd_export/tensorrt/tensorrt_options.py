"""Options of a TensorRT build: its GPU and capacity, and the TensorRT package that builds."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from dsbd_export.errors import ExportError
from dsbd_runtime.device.cuda_device import gpu_compute_capability, import_cuda_runtime
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, Flavour, import_trt

MIN_CAPACITY = 256  # rows of the largest call
CAPACITY_STEP = 64  # rows that attention kernels read at a time


@dataclass(frozen=True, kw_only=True)
class TensorrtOptions:
    """The options of one build."""

    engine: str
    # of the GPU that will run the engine, such as "12.0"; None: of this machine's GPU
    compute_capability: str | None = None
    # rows of the caches; None: the longer context of both models, rounded up, at most
    # ``tensorrt_build.MOST_DEFAULT_CAPACITY``
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in FLAVOURS:
            flavours = ", ".join(FLAVOURS)
            raise ExportError(f"engine={self.engine!r} is no TensorRT; use one of {flavours}")
        named = self.compute_capability
        if named is not None and re.fullmatch(r"\d+\.\d", named) is None:
            raise ExportError(
                f"compute_capability={named!r} is none; use one like 12.0 "
                "(nvidia-smi --query-gpu=compute_cap --format=csv shows a machine's)"
            )
        if self.capacity is not None and (
            self.capacity < MIN_CAPACITY or self.capacity % CAPACITY_STEP
        ):
            raise ExportError(
                f"capacity={self.capacity} cannot be built; use a multiple of {CAPACITY_STEP}, "
                f"{MIN_CAPACITY} or more"
            )


@dataclass(frozen=True)
class BuildPlace:
    """The TensorRT package that builds, and the GPU that it builds for."""

    flavour: Flavour
    trt: ModuleType
    compute_capability: str  # of the GPU that it builds for


def compute_capability_here(engine: str) -> str | None:
    """Return the compute capability of this machine's first GPU, None without a GPU."""
    try:
        runtime = import_cuda_runtime(FLAVOURS[engine].provider.install_line)
    except ProviderError:
        return None
    return gpu_compute_capability(runtime, 0)


def build_place(
    options: TensorrtOptions,
    *,
    here: Callable[[str], str | None] = compute_capability_here,
    import_module: Callable[[Flavour], ModuleType] = import_trt,
) -> BuildPlace:
    """Return the TensorRT to build with; called before the export, which takes much longer.

    Raises ProviderError if it is not installed, ExportError if it cannot build for the options.
    """
    flavour = FLAVOURS[options.engine]
    trt = import_module(flavour)
    wanted, local = options.compute_capability, here(options.engine)
    if flavour.builds_for_others:
        _check_known(trt, flavour, wanted or local)
    elif local is None:
        raise ExportError(
            f"engine={flavour.name!r} is built on the GPU that runs it, and none is found here; "
            "export with engine='onnx' and run dsbd-export --bundle on the machine with the GPU"
        )
    elif wanted is not None and wanted != local:
        raise ExportError(
            f"compute_capability={wanted!r}, but engine={flavour.name!r} builds only for the GPU "
            f"of this machine, {local}; leave it out, or use engine='tensorrt-rtx'"
        )
    capability = wanted or local
    assert capability is not None  # as checked
    return BuildPlace(flavour, trt, capability)


def capability_name(compute_capability: str) -> str:
    """Return a capability's name in ``trt.ComputeCapability``: SM120 for "12.0"."""
    return f"SM{compute_capability.replace('.', '')}"


def _check_known(trt: ModuleType, flavour: Flavour, wanted: str | None) -> None:
    names = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    supported = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in names)
    if wanted is None:
        raise ExportError(
            f"no GPU is found here: name the GPU of engine={flavour.name!r} by "
            f"compute_capability, one of {supported}"
        )
    if capability_name(wanted) not in names:
        raise ExportError(
            f"engine={flavour.name!r} cannot be built for compute capability {wanted}; "
            f"{flavour.name} {trt.__version__} knows {supported}"
        )
