"""How much of a cluster one replica gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.pipeline_settings import PipelineSettings
from dsbd_runtime.providers import parse_placement

_CORE_PARTS = 10_000  # Ray counts cores to four decimals


@dataclass(frozen=True)
class NodeRoom:
    """What a node has, whoever uses it now."""

    cores: float
    gpus: float


@dataclass(frozen=True)
class ReplicaShare:
    """What one replica takes.

    Attributes:
        cores: of one node; less than 1 where replicas share a core.
        gpus: of one node.
    """

    cores: float
    gpus: int

    @property
    def num_threads(self) -> int:
        """How many threads use these cores."""
        return max(1, int(self.cores))


def num_gpus(pipeline: PipelineSettings) -> int:
    """Return how many GPUs of its node a replica names; Ray numbers those it gives from 0."""
    names = (pipeline.provider, pipeline.draft_provider or pipeline.provider)
    placements = [parse_placement(name) for name in names]
    return max(p.device_id + 1 if p.provider.has_device_caches else 0 for p in placements)


def replica_share(nodes: Sequence[NodeRoom], num_replicas: int, gpus: int) -> ReplicaShare:
    """Return the largest share of which the nodes have ``num_replicas``.

    Two nodes of 3 cores have two shares of 3, three or four of 1 (a share lies on one node), and
    seven or eight of 0.75.

    Raises:
        ClusterError: the nodes have too few GPUs, or no core.
    """
    shares = _possible_shares(nodes, num_replicas)
    fitting = [share for share in shares if _num_fitting(nodes, share, gpus) >= num_replicas]
    if not fitting:
        raise ClusterError(
            f"the cluster has {sum(node.cores for node in nodes):g} cores and "
            f"{sum(node.gpus for node in nodes):g} GPUs on {len(nodes)} nodes, which is no room "
            f"for {num_replicas} replicas of {gpus} GPUs each; give fewer --replicas"
        )
    return ReplicaShare(max(fitting), gpus)


def _possible_shares(nodes: Iterable[NodeRoom], num_replicas: int) -> set[float]:
    """Return the shares that use up a node: whole cores, or parts of one as Ray counts them."""
    shares = set()
    for node in nodes:
        for num_on_node in range(1, num_replicas + 1):
            share = node.cores / num_on_node
            if share > 0:
                parts = _CORE_PARTS if share < 1 else 1
                shares.add(math.floor(share * parts) / parts)
    return shares - {0.0}


def _num_fitting(nodes: Iterable[NodeRoom], share: float, gpus: int) -> int:
    by_cores = [int(node.cores / share) for node in nodes]
    if gpus == 0:
        return sum(by_cores)
    return sum(min(num, int(node.gpus // gpus)) for num, node in zip(by_cores, nodes, strict=True))
