"""dsbd-serve as a process on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMMAND = (sys.executable, "-c", "from dsbd_ort.cli import serve; serve()")
_READY = re.compile(rb"serving \S+ at (http://\S+)/v1\n")
_START_S, _END_S = 60, 60
_LOG_BYTES = 100_000  # more than a start writes


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        url: without a path.
        process: ended and waited for by whoever wants to see how it ends.
    """

    url: str
    process: subprocess.Popen[bytes]

    def end(self) -> int:
        """Ask it to end, return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)


@contextlib.contextmanager
def server_process(*arguments: object) -> Iterator[ServerProcess]:
    """Start ``dsbd-serve`` with arguments but for the port; kill it where it is left.

    Raises:
        RuntimeError: it ended, or took too long; the message holds its log.
    """
    with tempfile.TemporaryFile() as log:
        words = [*_COMMAND, *map(str, arguments), "--port", "0"]
        process = subprocess.Popen(words, stderr=log)
        try:
            yield ServerProcess(_url(process, log.fileno(), words), process)
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: int, words: Sequence[str]) -> str:
    until = time.monotonic() + _START_S
    while True:
        has_ended = process.poll() is not None
        text = os.pread(log, _LOG_BYTES, 0)
        if found := _READY.search(text):
            return found[1].decode()
        if has_ended or time.monotonic() > until:
            raise RuntimeError(f"{' '.join(words)} does not serve:\n{text.decode()}")
        time.sleep(0.02)
