"""Replicas on a Ray cluster that answer the lines of a batch.

Ray places the actors, restarts one that ended, on another node if necessary, and repeats the call
for its line. An idle replica gets the next line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from dsbd_ort.batch.answer_sources import (
    WAIT_SECONDS,
    Answers,
    Backlog,
    MayStop,
    answers_in_order,
)
from dsbd_ort.batch.prompt_lines import BatchSettings, LineAnswer, RawLine
from dsbd_ort.cluster.connection import connected, first_line
from dsbd_ort.cluster.replica import ClusterError, Replica, cores_of_replica, num_gpus

_MAX_RESTARTS = 10  # of a replica: one that cannot start must not be restarted for ever
_MAX_RETRIES = 3  # of a line: one that kills its replica must not kill all of them


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Answer source: actors on a Ray cluster.

    ``answers`` raises ClusterError if the cluster cannot be used, a replica cannot open the bundle,
    or one ends again and again.

    Attributes:
        address: of the cluster, see ``connected``.
        num_replicas: number of pipelines.
        report: called with lines that name the cluster and the resources of a replica.
    """

    address: str
    num_replicas: int
    report: Callable[[str], None]

    def answers(self, backlog: Backlog) -> Answers:
        """See AnswerSource."""
        with connected(self.address, self.report):
            replicas = self._start(backlog.settings, backlog.fingerprint)
            yield from answers_in_order(replicas, _answer, backlog)

    def _start(self, settings: BatchSettings, fingerprint: str) -> list[ActorHandle[Replica]]:
        gpus = num_gpus(settings.pipeline)
        if (num_threads := settings.pipeline.num_threads) is None:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
            resources = [node["Resources"] for node in nodes if node["Alive"]]
            cores = cores_of_replica(resources, self.num_replicas, gpus)
        else:
            cores = max(1, num_threads // self.num_replicas)
        threads = max(1, int(cores))
        self.report(
            f"replicas: {self.num_replicas}, threads of each: {threads}; they start as soon as the "
            "cluster has room"
        )
        pipeline = replace(
            settings.pipeline,
            bundle=settings.pipeline.bundle.absolute(),  # Ray runs replicas in folders of its own
            num_threads=threads,
        )
        actor: Any = ray.remote(Replica).options(
            num_cpus=cores,
            num_gpus=gpus,
            max_restarts=_MAX_RESTARTS,
            max_task_retries=_MAX_RETRIES,
        )
        own = replace(settings, pipeline=pipeline)
        return [actor.remote(own, fingerprint) for _ in range(self.num_replicas)]


def _answer(replica: ActorHandle[Replica], line: RawLine, may_stop: MayStop) -> LineAnswer | None:
    pending: Any = replica.answer.remote(line)
    try:
        while not ray.wait([pending], timeout=WAIT_SECONDS)[0]:
            if may_stop():
                return None
        answer: LineAnswer = ray.get(pending)
        return answer
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise ClusterError(
            f"a replica ended at line {line.number} of the input, and again after restarts "
            f"({first_line(error)}); if memory ran out use fewer --replicas or fewer beams for "
            "that line, else check that every node has this version of dsbd-ort; run the same "
            "command again to go on"
        ) from error
