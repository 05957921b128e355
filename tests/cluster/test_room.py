"""What a replica gets of nodes of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.cluster.room import NodeRoom, ReplicaShare, num_gpus, replica_share
from dsbd_ort.pipeline_settings import PipelineSettings

SHARES = [  # cores of the nodes, replicas, cores of each
    ([2], 1, 2),
    ([2], 2, 1),
    ([2], 8, 0.25),
    ([3], 7, 0.4285),
    ([3, 3], 2, 3),
    ([3, 3], 3, 1),
    ([3, 3], 4, 1),
    ([3, 3], 7, 0.75),
    ([16, 4], 3, 5),
    ([0, 8], 4, 2),
]


@pytest.mark.parametrize(("cores", "num_replicas", "share"), SHARES)
def test_the_largest_share_that_all_replicas_find(cores, num_replicas, share):
    nodes = [NodeRoom(number, 0) for number in cores]
    assert replica_share(nodes, num_replicas, 0) == ReplicaShare(share, 0)


def test_a_share_has_at_least_one_thread():
    assert [ReplicaShare(cores, 0).num_threads for cores in (0.25, 1, 3)] == [1, 1, 3]


def test_gpus_bound_the_replicas_of_a_node():
    nodes = [NodeRoom(16, 2), NodeRoom(16, 0), NodeRoom(8, 1)]
    assert replica_share(nodes, 3, 1) == ReplicaShare(8, 1)
    with pytest.raises(ClusterError, match=r"has 40 cores and 3 GPUs on 3 nodes.*4 replicas of 1"):
        replica_share(nodes, 4, 1)


@pytest.mark.parametrize(
    ("provider", "draft_provider", "gpus"),
    [("cpu", None, 0), ("cuda", None, 1), ("cuda", "cpu", 1), ("cuda:1", "cuda:0", 2)],
)
def test_as_many_gpus_as_the_providers_name(provider, draft_provider, gpus):
    settings = PipelineSettings(
        bundle=Path("bundle"), provider=provider, draft_provider=draft_provider
    )
    assert num_gpus(settings) == gpus
