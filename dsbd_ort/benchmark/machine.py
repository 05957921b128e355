"""Where a benchmark ran: the machine and the versions of what it ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_DISTRIBUTIONS = ("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine.

    Attributes:
        num_cpus, num_usable_cpus: of the machine, of this process.
        memory_bytes: of the machine, None where it does not tell.
        load_average: processes that wanted to run in the last minute, when the benchmark began;
            None where the system does not tell. Much above 0 means that others disturbed it.
    """

    system: str
    architecture: str
    processor: str
    num_cpus: int | None
    num_usable_cpus: int | None
    memory_bytes: int | None
    load_average: float | None


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    load = getattr(os, "getloadavg", None)  # Windows has it not
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
    """Return the versions of Python, of this distribution and of what it runs on."""
    found = {"python": platform.python_version(), "dsbd-ort": dsbd_ort_version}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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
