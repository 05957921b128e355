"""Which cluster is meant: the one that is named, the one that runs here, or none."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from dsbd_ort.cluster.errors import ClusterError

AUTO = "auto"
_CLIENT_SCHEME = "ray://"
_REACH_SECONDS = 5.0


def resolved_address(given: str, environment: Mapping[str, str]) -> str | None:
    """Return the address of a cluster that answers, None where "auto" finds none.

    Ray would look in the same places, but tries for minutes where nobody listens.

    Args:
        given: "auto", "host:port" or "ray://host:port".
        environment: RAY_ADDRESS and RAY_TMPDIR count.

    Raises:
        ClusterError: an address that was given is none, or nobody listens there.
    """
    if given != AUTO:
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
            f"{source}: nobody listens there; start a cluster with 'ray start --head', mend the "
            "address, or give --cluster auto"
        )
    return address


def _host_and_port(address: str, source: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(_CLIENT_SCHEME).rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise ClusterError(
            f"{source} is no address of a Ray cluster; expected auto, HOST:PORT or "
            "ray://HOST:PORT, as in 10.0.0.5:6379"
        )
    return host.strip("[]"), int(port)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_REACH_SECONDS).close()
    except (OSError, OverflowError):  # OverflowError: no such port
        return False
    return True
