"""The machine of a benchmark: processor, memory, versions, energy counters.

RAPL counts the joules of processors, NVML the joules of GPUs. Both include everything that runs on
the device.
"""

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:\d+")  # AMD's too; parts of a package are named 0:0
_DISTRIBUTIONS = ("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine."""

    system: str
    architecture: str
    processor: str
    num_cpus: int | None
    num_usable_cpus: int | None
    memory_bytes: int | None  # None if unknown
    # in the minute before the benchmark, None if unknown; far above 0: other work disturbed it
    load_average: float | None


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    load = getattr(os, "getloadavg", None)  # not on Windows
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=_processor(),
        num_cpus=os.cpu_count(),
        num_usable_cpus=len(affinity(0)) if affinity else None,
        memory_bytes=_memory_bytes(),
        load_average=load()[0] if load else None,
    )


def versions(dsbd_ort_version: str) -> dict[str, str]:
    """Return the versions of Python, of this distribution and of its dependencies."""
    version_by_name = {"python": platform.python_version(), "dsbd-ort": dsbd_ort_version}
    for name in _DISTRIBUTIONS:
        try:
            version_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return version_by_name


def _processor(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class RaplCounter:
    """Energy counter of a processor package, from the kernel's powercap files."""

    def __init__(self, folder: Path) -> None:
        self.name = f"rapl {folder.name}"
        self._file = folder / "energy_uj"
        self._range = _number(folder / "max_energy_range_uj")
        self._last = _number(self._file)
        self._total = 0

    def joules(self) -> float:
        """Return the energy since construction; the file's number wraps around at its range."""
        energy = _number(self._file)
        self._total += (energy - self._last) % (self._range + 1)
        self._last = energy
        return self._total * 1e-6


class NvmlCounter:
    """Energy counter of the first GPU, from the loading of its driver."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._device = nvml.nvmlDeviceGetHandleByIndex(0)
        self.name = f"nvml 0: {nvml.nvmlDeviceGetName(self._device)}"
        self.joules()  # raises if the GPU has no counter

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device)) * 1e-3


EnergyCounter = RaplCounter | NvmlCounter
"""Counts the joules that one device of the machine has used since some fixed moment."""


class EnergyMeter:
    """The sum of several energy counters."""

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        self._counters = counters

    @property
    def names(self) -> list[str]:
        return [counter.name for counter in self._counters]

    def joules(self) -> float | None:
        """Return the energy used since some fixed moment, None without a counter."""
        if not self._counters:
            return None
        return sum(counter.joules() for counter in self._counters)

    def joules_since(self, earlier: float | None) -> float | None:
        now = self.joules()
        return None if now is None or earlier is None else now - earlier


def energy_meter(providers: Sequence[str], powercap: Path = POWERCAP) -> EnergyMeter:
    """Return a meter of the processors and, unless all run on "cpu", of the first GPU."""
    counters: list[EnergyCounter] = [*rapl_counters(powercap)]
    if any(provider != "cpu" for provider in providers):
        counters += nvml_counters()
    return EnergyMeter(counters)


def rapl_counters(powercap: Path) -> list[RaplCounter]:
    """Return a counter per processor package whose files may be read (often only by root)."""
    counters = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if _PACKAGE.fullmatch(folder.name):
            try:
                counters.append(RaplCounter(folder))
            except (OSError, ValueError):  # not readable, so not measured; the report shows this
                continue
    return counters


def _number(file: Path) -> int:
    return int(file.read_text())


def nvml_counters() -> list[NvmlCounter]:
    """Return the first GPU's counter, or [] if the package, driver or counter is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        return [NvmlCounter(nvml)]
    except nvml.NVMLError:
        return []
