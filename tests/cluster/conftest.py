"""One Ray cluster for all tests of this folder that need one."""

from collections.abc import Iterator

import pytest

from tests.cluster.own_cluster import OwnCluster, own_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[OwnCluster]:
    with own_cluster() as running:
        yield running
