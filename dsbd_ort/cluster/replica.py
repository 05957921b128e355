"""Replica of a batch: a pipeline on one node, and its share of the cluster's cores and GPUs."""

import math
import socket
from collections.abc import Mapping, Sequence

from dsbd_errors import DsbdError
from dsbd_ort.batch.prompt_lines import BatchSettings, LineAnswer, RawLine, answer_line
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from dsbd_runtime.engine.providers import parse_placement


class ClusterError(DsbdError):
    """The cluster cannot be reached or is too small, or a replica cannot run."""


class Replica:
    """A Ray actor; if it cannot open its bundle, every call raises the reason.

    If the constructor raised, the actor would be dead, and Ray would not report the reason.
    """

    def __init__(self, settings: BatchSettings, fingerprint: str) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._opened: Pipeline | ClusterError
        try:
            if settings.fingerprint() != fingerprint:  # its answers would differ from others'
                raise ClusterError(f"the bundle at {settings.pipeline.bundle} is another one there")
            self._opened = settings.pipeline.open()
        except DsbdError as error:
            self._opened = ClusterError(
                f"replica on node {socket.gethostname()}: {error}; every node needs the same "
                "bundle at the same path, and the same version of dsbd-ort"
            )

    def answer(self, line: RawLine) -> LineAnswer:
        if isinstance(self._opened, ClusterError):
            raise self._opened
        answer = answer_line(self._opened, self._settings, self._fingerprint, line, lambda: False)
        assert answer is not None  # None only for an interrupted line
        return answer


def num_gpus(pipeline: PipelineSettings) -> int:
    """Return how many GPUs of its node a replica needs; Ray numbers each replica's GPUs from 0."""
    names = (pipeline.provider, pipeline.draft_provider or pipeline.provider)
    placements = [parse_placement(name) for name in names]
    return max(p.device_id + 1 if p.provider.has_device_caches else 0 for p in placements)


def cores_of_replica(
    nodes: Sequence[Mapping[str, float]], num_replicas: int, num_gpus: int
) -> float:
    """Return the largest number of cores that every replica can have, each on one node.

    Two nodes of 3 cores have 3 cores for each of two replicas, 1 for three or four, and 0.5 for
    seven to twelve. ClusterError: the nodes have too few GPUs, or no core.

    nodes: "CPU" and "GPU" of each node, in use or not, as Ray counts them.
    num_gpus: number of GPUs that each replica needs as well, on the same node.
    """
    cpus, gpus = ([node.get(kind, 0.0) for node in nodes] for kind in ("CPU", "GPU"))
    wholes: list[float] = [*range(int(max(cpus, default=0)), 0, -1)]
    parts = [math.floor(1e4 / shared) / 1e4 for shared in range(2, num_replicas + 1)]
    for cores in wholes + parts:
        on_each = [int(number / cores) for number in cpus]
        if num_gpus:
            on_each = [min(n, int(g // num_gpus)) for n, g in zip(on_each, gpus, strict=True)]
        if sum(on_each) >= num_replicas:
            return cores
    raise ClusterError(
        f"the cluster has {sum(cpus):g} cores and {sum(gpus):g} GPUs on {len(nodes)} nodes, too "
        f"few for {num_replicas} replicas of {num_gpus} GPUs each; use fewer --replicas"
    )
