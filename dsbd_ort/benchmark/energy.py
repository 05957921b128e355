"""Joules that the machine has used, where it counts them: RAPL for processors, NVML for GPUs.

Both count everything that runs on the part, not this process alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dsbd_ort.benchmark.nvml_counter import nvml_counters

POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:\d+")  # AMD's have this name too; parts of a package have 0:0


class EnergyCounter(Protocol):
    """One part of the machine that counts its energy."""

    @property
    def name(self) -> str:
        """What is counted."""

    def joules(self) -> float:
        """Return the energy used since some fixed moment."""


class RaplCounter:
    """A processor package, from the kernel's powercap files."""

    def __init__(self, folder: Path) -> None:
        """Start counting; the folder holds energy_uj and max_energy_range_uj."""
        self.name = f"rapl {folder.name}"
        self._file = folder / "energy_uj"
        self._range = _number(folder / "max_energy_range_uj")
        self._last = _number(self._file)
        self._total = 0

    def joules(self) -> float:
        """Return the energy since construction; the file's number wraps around at its range."""
        found = _number(self._file)
        self._total += (found - self._last) % (self._range + 1)
        self._last = found
        return self._total * 1e-6


class EnergyMeter:
    """The sum of what all counters of a run have counted."""

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        """Take the counters; none means that nothing can be measured."""
        self._counters = counters

    @property
    def names(self) -> list[str]:
        """What is counted."""
        return [counter.name for counter in self._counters]

    def joules(self) -> float | None:
        """Return the energy used since some fixed moment, None without a counter."""
        if not self._counters:
            return None
        return sum(counter.joules() for counter in self._counters)

    def joules_since(self, earlier: float | None) -> float | None:
        """Return the energy used since ``joules()`` returned ``earlier``."""
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
            except (OSError, ValueError):  # not readable means not measured, and is reported so
                continue
    return counters


def _number(file: Path) -> int:
    return int(file.read_text())
