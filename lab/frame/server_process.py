"""Process of dsbd-serve on a free port, and its resident memory over time (Linux)."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import numpy as np

from scripts.document_sections import table
from scripts.machine import memory_of

MODEL = "measured"
_COMMAND = (sys.executable, "-c", "from dsbd_ort.cli import serve; serve()")
_READY = re.compile(rb"serving \S+ at (http://\S+)/v1\n")
_START_S, _END_S = 60, 60
_LOG_BYTES = 100_000  # more than a start writes


@dataclass(frozen=True)
class ServerProcess:
    """A running server.

    Attributes:
        url: address without a path.
        process: ``end`` waits for its exit code.
        log_file: file descriptor of its log.
    """

    url: str
    process: subprocess.Popen[bytes]
    log_file: int

    def log(self) -> str:
        return os.pread(self.log_file, _LOG_BYTES, 0).decode()

    def end(self) -> int:
        """Terminate it; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)


@contextlib.contextmanager
def server_process(*arguments: object) -> Iterator[ServerProcess]:
    """Start ``dsbd-serve`` on a free port with arguments; kill it at the end of the block.

    Raises:
        RuntimeError: it ended, or took too long; the message contains its log.
    """
    with tempfile.TemporaryFile() as log:
        words = [*_COMMAND, *map(str, arguments), "--port", "0"]
        process = subprocess.Popen(words, stderr=log)
        try:
            yield ServerProcess(_url(process, log.fileno(), words), process, log.fileno())
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def client_of(bundle: Path, threads: int, *options: object) -> Iterator[httpx2.Client]:
    """Yield a client of a new ``dsbd-serve``, which serves a bundle as ``MODEL``."""
    with (
        server_process(bundle, *served(MODEL, threads), *options) as server,
        httpx2.Client(base_url=server.url, timeout=600) as http,
    ):
        yield http


def served(model: str, threads: int) -> tuple[object, ...]:
    """Return the options of every measured server."""
    return ("--model-name", model, "--threads", threads, "--no-access-log")


def _url(process: subprocess.Popen[bytes], log: int, words: Sequence[str]) -> str:
    until = time.monotonic() + _START_S
    while True:
        has_ended = process.poll() is not None
        text = os.pread(log, _LOG_BYTES, 0)
        if match := _READY.search(text):
            return match[1].decode()
        if has_ended or time.monotonic() > until:
            raise RuntimeError(f"{' '.join(words)} does not serve:\n{text.decode()}")
        time.sleep(0.02)


@dataclass
class MemorySamples:
    """Megabytes over seconds since the first sample."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def slope_after(self, share: float) -> float:
        """Return megabytes per minute: the slope of a line fitted after ``share`` of the time."""
        begin = int(share * len(self.seconds))
        seconds, megabytes = self.seconds[begin:], self.megabytes[begin:]
        return float(60 * np.polyfit(seconds, megabytes, 1)[0])

    def table(self, num_rows: int = 10) -> list[str]:
        """Return the lines of a table of evenly spaced samples."""
        indices = np.linspace(0, len(self.seconds) - 1, num_rows).astype(int)
        rows = [(f"{self.seconds[i]:.0f}", f"{self.megabytes[i]:.1f}") for i in indices]
        return table(["seconds", "resident MB"], rows)


@contextlib.contextmanager
def sampled_memory(process_id: int, every_s: float) -> Iterator[MemorySamples]:
    """Sample the process until the end of the block."""
    samples, is_over = MemorySamples(), threading.Event()
    began = time.monotonic()

    def sample() -> None:
        while not is_over.wait(every_s):
            resident = memory_of(process_id)["VmRSS"]
            samples.seconds.append(time.monotonic() - began)
            samples.megabytes.append(resident / 2**20)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
