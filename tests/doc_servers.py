"""A server as the documentation starts it, on a free port: dsbd-serve, or Ray Serve."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from lab.frame.server_process import server_process
from tests.cluster.own_cluster import own_cluster, serve_run

DOCUMENTED_URL = "http://127.0.0.1:8000"


@contextlib.contextmanager
def running(command: str) -> Iterator[str]:
    """Give the URL of a server; it must end in order when the block is over."""
    name, *options = shlex.split(command)
    if name == "serve":
        with own_cluster() as cluster, serve_run(cluster, options[1:]) as served:
            yield served.url
        return
    assert name == "dsbd-serve", command
    try:
        with server_process(*options) as server:
            yield server.url
            assert server.end() == 0, command
    except RuntimeError as error:
        raise AssertionError(str(error)) from error
