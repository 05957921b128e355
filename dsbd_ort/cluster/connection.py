"""A connection to a cluster for as long as a block lasts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

import ray

from dsbd_ort.batch.workers import usable_cores
from dsbd_ort.cluster.address import resolved_address
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.cluster.room import NodeRoom

_STORE_BYTES = 100_000_000  # lines and answers pass through it, never weights


@contextlib.contextmanager
def connected(address: str, report: Callable[[str], None]) -> Iterator[None]:
    """Connect to a cluster; what is started here ends with the block.

    Args:
        address: of a cluster, see ``resolved_address``; where "auto" finds none, one is started
            on this machine alone.
        report: is told which cluster it is.

    Raises:
        ClusterError: it cannot be reached, or not any more.
    """
    # What Ray prints of its workers goes to stdout, which belongs to results.
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


def node_rooms() -> list[NodeRoom]:
    """Return what every living node of the cluster has."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return [NodeRoom(room.get("CPU", 0.0), room.get("GPU", 0.0)) for room in resources]


def first_line(error: BaseException) -> str:
    """Return the line that says it; Ray puts whole reports into its errors."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _connect(given: str) -> str:
    """Connect; return which cluster it is."""
    address = resolved_address(given, os.environ)
    if address is None:
        _start()
        return "no Ray cluster runs here: started one on this machine for this run"
    try:
        ray.init(given, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # of many types, none of them documented
        raise ClusterError(
            f"the Ray cluster at {address} does not take this machine ({first_line(error)}); it "
            "wants the same versions of Ray and Python, RAY_AUTH_MODE=token and its token if it "
            "has one, and for HOST:PORT that this machine is a node: else give ray://HOST:10001"
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
    """Keep our answer to SIGTERM; connecting puts Ray's, which ends the process, in its place."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)
