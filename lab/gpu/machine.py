"""Machine of a check: the GPU, its driver, and the versions of the packages."""

import argparse
import ctypes
import importlib.metadata
import json
import platform
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.gpu.settings import WEBGPU

PACKAGES = (
    "onnxruntime-gpu", "onnxruntime", "onnxruntime-ep-webgpu", "tensorrt", "tensorrt-rtx",
    "cuda-bindings", "nvidia-ml-py", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13", "nvidia-curand", "nvidia-cufft", "numpy", "torch", "transformers",
)  # fmt: skip
_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")


def describe_machine(provider: str) -> dict[str, Any]:
    """Return the system, the GPUs that nvidia-smi or Vulkan lists, and versions by package."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = _vulkan_gpus() if provider == WEBGPU else _gpus()
    return {"system": platform.platform(), "gpus": gpus, "versions": versions}


def _gpus() -> list[dict[str, str]]:
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, row, strict=False)) for row in rows]


def _vulkan_gpus() -> list[dict[str, str]]:
    """Return names and drivers of Vulkan's devices, [] without its loader (as on macOS)."""
    try:
        vulkan = ctypes.CDLL("vulkan-1.dll" if sys.platform == "win32" else "libvulkan.so.1")
    except OSError:
        return []
    instance, number = ctypes.c_void_p(), ctypes.c_uint32()
    wanted = (ctypes.c_uint64 * 8)(1)  # a VkInstanceCreateInfo is its type and zeros
    if vulkan.vkCreateInstance(wanted, None, ctypes.byref(instance)):
        return []
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(number), None)
    devices = (ctypes.c_void_p * number.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(number), devices)
    gpus = []
    for device in devices:
        properties = ctypes.create_string_buffer(2048)  # longer than VkPhysicalDeviceProperties
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(device), properties)
        api, driver, _, _, _, name = struct.unpack_from("<5I256s", properties)
        version = f"driver {driver:#x}, Vulkan {api >> 22}.{api >> 12 & 1023}"
        gpus.append({"name": name.partition(b"\0")[0].decode(), "driver_version": version})
    return gpus


def main() -> None:
    """Write the description to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    text = json.dumps(describe_machine(options.provider), indent=1)
    options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
