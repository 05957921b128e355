"""One Ray cluster for all tests of this folder that need one."""

import warnings
from collections.abc import Iterator

import pytest

from tests.cluster.own_cluster import OwnCluster, own_cluster

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ray 2.60 uses what pydantic 2.14 deprecates
    import ray.serve  # noqa: F401  # before a test imports dsbd_ort.cluster.serve_app


@pytest.fixture(scope="session")
def cluster() -> Iterator[OwnCluster]:
    with own_cluster() as running:
        yield running
