"""State of the machine: idle cores, memory bandwidth, a process's memory; occupies one core."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PROC_STAT = Path("/proc/stat")
_IDLE = 0.95
_LOOK_S = 0.5
_NUM_FIELDS = 8  # fields of the first line: user, nice, system, idle, iowait, irq, softirq, steal
_NUM_FLOATS = 64 * 2**20


def wait_until_idle(most_seconds: float, proc_stat: Path = PROC_STAT) -> float:
    """Wait until no other process computes; return the idle share of the cores at the end."""
    stop = time.monotonic() + most_seconds
    while (idle := _idle_share(proc_stat)) < _IDLE and time.monotonic() < stop:
        time.sleep(_LOOK_S)
    return idle


def _idle_share(proc_stat: Path) -> float:
    before = _ticks(proc_stat)
    time.sleep(_LOOK_S)
    idle, total = (now - then for now, then in zip(_ticks(proc_stat), before, strict=True))
    return idle / max(total, 1)


def _ticks(proc_stat: Path) -> tuple[int, int]:
    """Return the idle ticks and all ticks, summed over the cores, since the machine started."""
    numbers = [int(number) for number in proc_stat.read_text().split("\n", 1)[0].split()[1:]]
    return numbers[3] + numbers[4], sum(numbers[:_NUM_FIELDS])


def memory_of(process: int | str = "self") -> dict[str, int]:
    """Return a process's memory in /proc by name, in bytes (VmRSS, VmHWM, RssAnon, ...).

    Returns {} if the process has ended.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: 1024 * int(value.split()[0]) for name, _, value in fields}


@contextmanager
def one_core_taken() -> Iterator[None]:
    """In the block, another process in a separate session computes all the time.

    Linux shares the cores between sessions. A process of another session gets a whole core, like a
    neighbour on a server; a process of our session would get only the time that our threads leave.
    """
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            time.sleep(_LOOK_S)
            yield
        finally:
            process.kill()


def memory_bandwidth(num_threads: int, repetitions: int = 8) -> float:
    """Return the bytes per second that ``num_threads`` threads read, the best of several tries."""
    numbers = np.ones(_NUM_FLOATS, np.float32)
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        threads = [
            threading.Thread(target=part.max) for part in np.array_split(numbers, num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - began)
    return numbers.nbytes / min(seconds)
