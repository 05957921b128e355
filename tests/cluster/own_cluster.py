"""A Ray cluster of the tests' own, and ``serve run`` on it; every process ends with the block."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HOLD = """
import ray, sys
context = ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


TOKEN = {"RAY_AUTH_MODE": "token"}
"""For all that connects: Ray never takes it for granted where an address is given."""


@dataclass(frozen=True)
class OwnCluster:
    """A running cluster.

    Attributes:
        address: for ``--cluster``.
        holder: the process that everything of it descends from.
    """

    address: str
    holder: int

    def actors(self, name: str) -> list[int]:
        """Return the process ids of its actors whose class begins with ``name``."""
        titles = {pid: _title(pid) for pid in descendants(self.holder)}
        return [pid for pid, title in titles.items() if title.startswith(f"ray::{name}")]


@contextlib.contextmanager
def own_cluster() -> Iterator[OwnCluster]:
    """Start a cluster of two cores; it ends with the block."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", _HOLD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            yield OwnCluster(holder.stdout.readline().strip(), holder.pid)
        finally:
            holder.stdin.close()


@dataclass(frozen=True)
class Served:
    """An application of Ray Serve.

    Attributes:
        url: of the HTTP service.
        process: ``serve run``, which ends the application when it is interrupted.
    """

    url: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def serve_run(cluster: OwnCluster, arguments: list[str]) -> Iterator[Served]:
    """Have ``serve run`` deploy an application, after a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, **TOKEN, "RAY_ADDRESS": cluster.address}
    serve = str(Path(sys.executable).with_name("serve"))
    subprocess.run(
        [serve, "start", "--http-port", port],
        env=environment,
        check=True,
        capture_output=True,
        timeout=240,
    )
    with subprocess.Popen(
        [serve, "run", "--address", cluster.address, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        log = ""
        while "is ready at" not in log and (line := process.stderr.readline()):
            log += line
        assert "is ready at" in log, log
        try:
            yield Served(f"http://127.0.0.1:{port}", process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=240)  # Ray may take long to end
            except subprocess.TimeoutExpired:  # the block would wait for it without end
                process.kill()
                raise


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` started, and those that they started."""
    found = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
