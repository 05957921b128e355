"""Replica of a batch: a pipeline on one node, and its share of the cluster's cores and GPUs."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsbd_errors import DsbdError
from dsbd_ort.batch.prompt_lines import BatchSettings, LineAnswer, RawLine, answer_line
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from dsbd_runtime.engine.providers import parse_placement

_CORE_PARTS = 10_000  # Ray counts cores to four decimals


class Replica:
    """A Ray actor; if it cannot open its bundle, every call raises the reason.

    An actor whose constructor raises would be dead, with a report of Ray's in place of the reason.
    """

    def __init__(self, settings: BatchSettings, fingerprint: str) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._opened: Pipeline | ClusterError
        try:
            self._opened = _open_same_bundle(settings, fingerprint)
        except DsbdError as error:
            self._opened = ClusterError(f"replica on node {socket.gethostname()}: {error}")

    def check(self) -> None:
        """Raise ClusterError if the bundle could not be opened."""
        self._pipeline()

    def answer(self, line: RawLine) -> LineAnswer:
        """Answer a line."""
        pipeline = self._pipeline()
        answer = answer_line(pipeline, self._settings, self._fingerprint, line, lambda: False)
        assert answer is not None  # None only for an interrupted line
        return answer

    def _pipeline(self) -> Pipeline:
        if isinstance(self._opened, ClusterError):
            raise self._opened
        return self._opened


def _open_same_bundle(settings: BatchSettings, fingerprint: str) -> Pipeline:
    """Open the bundle; raise if this node's answers would differ from those of others."""
    bundle = settings.pipeline.bundle
    if not bundle.is_dir():
        raise ClusterError(
            f"there is no bundle at {bundle}; copy it to the same path on every node, or put it "
            "into a folder that all of them mount"
        )
    if settings.fingerprint() != fingerprint:
        raise ClusterError(
            f"the bundle at {bundle}, or the version of dsbd-ort, differs from that of the machine "
            "that runs the command; install the same on every node"
        )
    return settings.pipeline.open()


@dataclass(frozen=True)
class NodeResources:
    """All cores and GPUs of a node, in use or not."""

    cores: float
    gpus: float


@dataclass(frozen=True)
class ReplicaShare:
    """Resources of one replica.

    Attributes:
        cores: of one node; less than 1 if replicas share a core.
        gpus: of one node.
    """

    cores: float
    gpus: int

    @property
    def num_threads(self) -> int:
        """Number of threads that use these cores."""
        return max(1, int(self.cores))


def num_gpus(pipeline: PipelineSettings) -> int:
    """Return how many GPUs of its node a replica names; Ray numbers them from 0 for each."""
    names = (pipeline.provider, pipeline.draft_provider or pipeline.provider)
    placements = [parse_placement(name) for name in names]
    return max(p.device_id + 1 if p.provider.has_device_caches else 0 for p in placements)


def replica_share(nodes: Sequence[NodeResources], num_replicas: int, gpus: int) -> ReplicaShare:
    """Return the largest share that fits ``num_replicas`` times on the nodes.

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
            f"{sum(node.gpus for node in nodes):g} GPUs on {len(nodes)} nodes, too few for "
            f"{num_replicas} replicas of {gpus} GPUs each; use fewer --replicas"
        )
    return ReplicaShare(max(fitting), gpus)


def _possible_shares(nodes: Iterable[NodeResources], num_replicas: int) -> set[float]:
    """Return the shares that use up a node: whole cores, or parts of one as Ray counts them."""
    shares = set()
    for node in nodes:
        for num_on_node in range(1, num_replicas + 1):
            share = node.cores / num_on_node
            if share > 0:
                parts = _CORE_PARTS if share < 1 else 1
                shares.add(math.floor(share * parts) / parts)
    return shares - {0.0}


def _num_fitting(nodes: Iterable[NodeResources], share: float, gpus: int) -> int:
    by_cores = [int(node.cores / share) for node in nodes]
    if gpus == 0:
        return sum(by_cores)
    return sum(min(num, int(node.gpus // gpus)) for num, node in zip(by_cores, nodes, strict=True))
