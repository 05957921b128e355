"""Resolution of addresses, without a cluster: plain sockets that listen or do not."""

import socket

import pytest

from dsbd_ort.cluster.actor_pool import resolved_address
from dsbd_ort.cluster.replica import ClusterError


@pytest.fixture
def heard():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def unheard():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def started(folder, address):
    """The environment of a machine where ``ray start`` has left its address."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address + "\n")
    return {"RAY_TMPDIR": str(folder)}


def test_an_address_that_is_given_counts(heard):
    assert resolved_address(heard, {"RAY_ADDRESS": "10.0.0.1:1"}) == heard
    assert resolved_address(f"ray://{heard}", {}) == f"ray://{heard}"


@pytest.mark.parametrize("address", ["10.0.0.5", "", "ray://host", "host:port", ":6379"])
def test_invalid_addresses_are_refused(address):
    message = "is not an address of a Ray cluster; expected auto, HOST"
    with pytest.raises(ClusterError, match=message):
        resolved_address(address, {})


def test_an_address_without_a_listener_is_refused(unheard):
    with pytest.raises(ClusterError, match=f"--cluster {unheard}: nothing listens there"):
        resolved_address(unheard, {})
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS {unheard}: nothing listens there"):
        resolved_address("auto", {"RAY_ADDRESS": unheard})


def test_auto_is_what_the_environment_names_then_what_runs_here(heard, tmp_path):
    running = started(tmp_path, heard)
    assert resolved_address("auto", running) == heard
    assert resolved_address("auto", {**running, "RAY_ADDRESS": "local"}) is None


def test_auto_is_nothing_where_nothing_runs(unheard, tmp_path):
    assert resolved_address("auto", {"RAY_TMPDIR": str(tmp_path)}) is None
    assert resolved_address("auto", started(tmp_path, unheard)) is None
