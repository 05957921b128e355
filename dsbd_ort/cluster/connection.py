"""Connection to a Ray cluster: at a given address, found here, or started for the run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from dsbd_ort.batch.workers import usable_cores
from dsbd_ort.cluster.replica import ClusterError

_ADDRESS = re.compile(r"(?:ray://)?\[?([^/\[\]]+)\]?:([0-9]+)")
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
            on_sigterm = signal.getsignal(signal.SIGTERM)
            report(_connect(address))
            signal.signal(signal.SIGTERM, on_sigterm)  # in place of Ray's, which ends the process
            yield
        except ConnectionError as error:
            raise ClusterError(
                f"the connection to the Ray cluster was lost ({first_line(error)}); run the same "
                "command again to go on"
            ) from error
        finally:
            ray.shutdown()


def first_line(error: BaseException) -> str:
    """Return the line with the cause; Ray puts whole reports into its errors."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _connect(given: str) -> str:
    """Connect; return the name of the cluster."""
    address = resolved_address(given, os.environ)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray has no argument for it
        quiet |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        ray.init("local", num_cpus=usable_cores(), **quiet)
        return "no Ray cluster runs here: started one on this machine for this run"
    try:
        ray.init(given, **quiet)
    except Exception as error:  # of many types, none of them documented
        raise ClusterError(
            f"the Ray cluster at {address} refuses this machine ({first_line(error)}); it requires "
            "the same versions of Ray and Python, RAY_AUTH_MODE=token and its token if it has one, "
            "and for HOST:PORT that this machine is a node: else use ray://HOST:10001"
        ) from error
    return f"the Ray cluster at {address}"


def resolved_address(given: str, environment: Mapping[str, str]) -> str | None:
    """Return the address of a cluster that answers, None if "auto" finds none.

    Ray would look in the same places, but tries for minutes to reach an address without a cluster.

    Args:
        given: "auto", "host:port" or "ray://host:port".
        environment: RAY_ADDRESS and RAY_TMPDIR are read.

    Raises:
        ClusterError: an address that was given is invalid, or nothing listens there.
    """
    address, source = given, f"--cluster {given}"
    if given == "auto":
        address = environment.get("RAY_ADDRESS", "")
        source = f"RAY_ADDRESS {address}"
        if address == "local":
            return None
        if not address:  # ``ray start`` leaves its address here; after a crash it is out of date
            file = Path(environment.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
            address = file.read_text().strip() if file.is_file() else ""
            return address if address and _listens(address, str(file)) else None
    if not _listens(address, source):
        raise ClusterError(
            f"{source}: nothing listens there; start a cluster with 'ray start --head', correct "
            "the address, or use --cluster auto"
        )
    return address


def _listens(address: str, source: str) -> bool:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ClusterError(
            f"{source} is not an address of a Ray cluster; expected auto, HOST:PORT or "
            "ray://HOST:PORT, as in 10.0.0.5:6379"
        )
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError):  # OverflowError: no such port
        return False
    return True
