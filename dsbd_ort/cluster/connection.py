"""Connection to a Ray cluster: at a given address, found here, or started for the run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ray

from dsbd_ort.batch.workers import usable_cores
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.cluster.replica import NodeResources

_AUTO = "auto"
_CLIENT_SCHEME = "ray://"
_CONNECT_SECONDS = 5.0
_STORE_BYTES = 100_000_000  # lines and answers pass through it, never weights


@contextlib.contextmanager
def connected(address: str, report: Callable[[str], None]) -> Iterator[None]:
    """Connect to a cluster for as long as the block lasts.

    Args:
        address: of a cluster, see ``resolved_address``; if "auto" finds none, one is started on
            this machine, and ended after the block.
        report: is called with a line that names the cluster.

    Raises:
        ClusterError: it cannot be reached, or the connection was lost.
    """
    # Ray prints messages of its workers to stdout, which is for results.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with _kept_termination_handler():
                report(_connect(address))
            yield
        except ConnectionError as error:
            raise ClusterError(
                f"the connection to the Ray cluster was lost ({first_line(error)}); run the same "
                "command again to go on"
            ) from error
        finally:
            ray.shutdown()


def node_resources() -> list[NodeResources]:
    """Return the resources of every living node of the cluster."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return [NodeResources(each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in resources]


def first_line(error: BaseException) -> str:
    """Return the line with the cause; Ray puts whole reports into its errors."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _connect(given: str) -> str:
    """Connect; return the name of the cluster."""
    address = resolved_address(given, os.environ)
    if address is None:
        _start()
        return "no Ray cluster runs here: started one on this machine for this run"
    try:
        ray.init(given, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # of many types, none of them documented
        raise ClusterError(
            f"the Ray cluster at {address} refuses this machine ({first_line(error)}); it requires "
            "the same versions of Ray and Python, RAY_AUTH_MODE=token and its token if it has one, "
            "and for HOST:PORT that this machine is a node: else use ray://HOST:10001"
        ) from error
    return f"the Ray cluster at {address}"


def _start() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray has no argument for it
    ray.init(
        "local",
        num_cpus=usable_cores(),
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


@contextlib.contextmanager
def _kept_termination_handler() -> Iterator[None]:
    """Keep our handler of SIGTERM; connecting replaces it by Ray's, which ends the process."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)


def resolved_address(given: str, environment: Mapping[str, str]) -> str | None:
    """Return the address of a cluster that answers, None if "auto" finds none.

    Ray would look in the same places, but tries for minutes to reach an address without a cluster.

    Args:
        given: "auto", "host:port" or "ray://host:port".
        environment: RAY_ADDRESS and RAY_TMPDIR are read.

    Raises:
        ClusterError: an address that was given is invalid, or nothing listens there.
    """
    if given != _AUTO:
        return _reached(given, f"--cluster {given}")
    if named := environment.get("RAY_ADDRESS"):
        return None if named == "local" else _reached(named, f"RAY_ADDRESS {named}")
    # ``ray start`` leaves its address here; after a crash it is out of date.
    file = Path(environment.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    started = file.read_text().strip() if file.is_file() else ""
    return started if started and _listens(*_host_and_port(started, str(file))) else None


def _reached(address: str, source: str) -> str:
    host, port = _host_and_port(address, source)
    if not _listens(host, port):
        raise ClusterError(
            f"{source}: nothing listens there; start a cluster with 'ray start --head', correct "
            "the address, or use --cluster auto"
        )
    return address


def _host_and_port(address: str, source: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(_CLIENT_SCHEME).rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise ClusterError(
            f"{source} is not an address of a Ray cluster; expected auto, HOST:PORT or "
            "ray://HOST:PORT, as in 10.0.0.5:6379"
        )
    return host.strip("[]"), int(port)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError):  # OverflowError: no such port
        return False
    return True
