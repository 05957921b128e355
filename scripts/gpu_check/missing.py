"""What a machine lacks for a check on a GPU, one line each."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

from gpu_check.settings import Settings
from gpu_check.wheels import wheel_names

DRIVER = "libcuda.so.1"
_PACKAGES = {  # wheel name: (module, distribution)
    "onnxruntime_gpu": ("onnxruntime", "onnxruntime-gpu"),
    "cuda_bindings": ("cuda", "cuda-bindings"),
}


def missing_things(
    settings: Settings, load_library: Callable[[str], object] = ctypes.CDLL
) -> list[str]:
    """Return what has to be there before a piece can run on a GPU; nothing for the CPU."""
    if settings.provider == "cpu":
        return []
    lines = []
    try:
        load_library(DRIVER)
    except OSError as error:
        lines.append(
            f"no NVIDIA driver: {error}; install one for CUDA 13 (580 or newer), in a container "
            "pass the GPU in (docker run --gpus all)"
        )
    for wheel, (module, distribution) in _PACKAGES.items():
        if not _is_here(settings, wheel, module, distribution):
            where = f"in {settings.wheels}" if settings.wheels else "in this Python"
            lines.append(f"no package {distribution} {where}; carry its wheel, see docs/gpu.md")
    return lines


def _is_here(settings: Settings, wheel: str, module: str, distribution: str) -> bool:
    if settings.wheels is not None:
        if not settings.wheels.is_dir():
            return False
        in_wheels = any(name.startswith(f"{wheel}-") for name in wheel_names(settings.wheels))
        return in_wheels or _is_in(settings.site_packages, wheel)
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec(module) is not None


def _is_in(site_packages: Path | None, wheel: str) -> bool:
    return site_packages is not None and any(site_packages.glob(f"{wheel}-*.dist-info"))
