"""The energy counter of an NVIDIA GPU, when the package nvidia-ml-py (pynvml) is installed."""

from __future__ import annotations

import importlib
from typing import Any


class NvmlCounter:
    """The first GPU, since its driver was loaded."""

    def __init__(self, nvml: Any) -> None:
        """Take the module pynvml, initialised."""
        self._nvml = nvml
        self._device = nvml.nvmlDeviceGetHandleByIndex(0)
        self.name = f"nvml 0: {nvml.nvmlDeviceGetName(self._device)}"
        self.joules()  # refused here where the GPU has no counter

    def joules(self) -> float:
        """Return the energy used since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device)) * 1e-3


def nvml_counters() -> list[NvmlCounter]:
    """Return the first GPU's counter, or nothing where there is no package, driver or counter."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        return [NvmlCounter(nvml)]
    except nvml.NVMLError:
        return []
