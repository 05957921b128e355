"""Resident memory of another process, sampled while something goes on (Linux)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass
class MemorySamples:
    """Megabytes over seconds since the first sample."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def slope_after(self, share: float) -> float:
        """Return megabytes a minute: a line through what came after ``share`` of the time."""
        begin = int(share * len(self.seconds))
        seconds, megabytes = self.seconds[begin:], self.megabytes[begin:]
        return float(60 * np.polyfit(seconds, megabytes, 1)[0])

    def table(self, num_rows: int = 10) -> Iterator[str]:
        """Yield the lines of a table of evenly spaced samples."""
        yield "| seconds | resident MB |"
        yield "|---|---|"
        for index in np.linspace(0, len(self.seconds) - 1, num_rows).astype(int):
            yield f"| {self.seconds[index]:.0f} | {self.megabytes[index]:.1f} |"


@contextlib.contextmanager
def sampled_memory(process_id: int, every_s: float) -> Iterator[MemorySamples]:
    """Sample the process until the end of the block."""
    samples, is_over = MemorySamples(), threading.Event()
    file, began = Path(f"/proc/{process_id}/status"), time.monotonic()

    def sample() -> None:
        while not is_over.wait(every_s):
            (line,) = (text for text in file.read_text().splitlines() if "VmRSS" in text)
            samples.seconds.append(time.monotonic() - began)
            samples.megabytes.append(int(line.split()[1]) / 1024)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
