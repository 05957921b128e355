"""Pool of replicas on a Ray cluster that answers the lines of a batch.

Ray places the actors, restarts one that ended, on another node if necessary, and repeats the call
for its line; here an idle replica gets the next line. That is all the scheduling there is, so it
needs no Ray Data: a data set would return results by blocks, repeat a lost one as a whole, and
require pandas on every node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from dsbd_ort.batch.answer_sources import Answers, Backlog, answers_in_order
from dsbd_ort.batch.prompt_lines import BatchSettings, LineAnswer, RawLine
from dsbd_ort.cluster.connection import connected, first_line, node_resources
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.cluster.replica import Replica, ReplicaShare, num_gpus, replica_share

_MAX_RESTARTS = 10  # of a replica: one that cannot start must not be restarted for ever
_MAX_RETRIES = 3  # of a line: one that kills its replica must not kill all of them
_WAIT_SECONDS = 0.2  # between two checks for an interruption


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
            share = self._share(backlog.settings)
            self.report(
                f"replicas: {self.num_replicas}, threads of each: {share.num_threads}; they start "
                "as soon as the cluster has room"
            )
            replicas = self._start(backlog.settings, backlog.fingerprint, share)
            _wait_until_open(replicas, backlog.is_interrupted)
            pool = _ReplicaPool(replicas)
            yield from answers_in_order(pool, backlog.lines, backlog.is_interrupted)

    def _share(self, settings: BatchSettings) -> ReplicaShare:
        gpus = num_gpus(settings.pipeline)
        if (num_threads := settings.pipeline.num_threads) is not None:
            return ReplicaShare(max(1, num_threads // self.num_replicas), gpus)
        return replica_share(node_resources(), self.num_replicas, gpus)

    def _start(
        self, settings: BatchSettings, fingerprint: str, share: ReplicaShare
    ) -> list[ActorHandle[Replica]]:
        pipeline = replace(
            settings.pipeline,
            bundle=settings.pipeline.bundle.absolute(),  # Ray runs replicas in folders of its own
            num_threads=share.num_threads,
        )
        actor: Any = ray.remote(Replica).options(
            num_cpus=share.cores,
            num_gpus=share.gpus,
            max_restarts=_MAX_RESTARTS,
            max_task_retries=_MAX_RETRIES,
        )
        own = replace(settings, pipeline=pipeline)
        return [actor.remote(own, fingerprint) for _ in range(self.num_replicas)]


class _ReplicaPool:
    """A AnswerPool of actors; see answer_sources."""

    def __init__(self, replicas: list[ActorHandle[Replica]]) -> None:
        self.num_members = len(replicas)
        self._idle = list(replicas)
        self._busy: dict[Any, tuple[ActorHandle[Replica], int, RawLine]] = {}  # by pending answer

    def has_idle(self) -> bool:
        return bool(self._idle)

    def send(self, index: int, line: RawLine) -> None:
        replica = self._idle.pop()
        self._busy[replica.answer.remote(line)] = (replica, index, line)

    def receive(self, seconds: float) -> list[tuple[int, LineAnswer]]:
        done, _ = ray.wait(list(self._busy), timeout=seconds)
        answers = []
        for pending in done:
            replica, index, line = self._busy.pop(pending)
            self._idle.append(replica)
            answers.append((index, _result(pending, f"at line {line.number} of the input")))
        return answers


def _wait_until_open(
    replicas: list[ActorHandle[Replica]], is_interrupted: Callable[[], bool]
) -> None:
    waiting: list[Any] = [replica.check.remote() for replica in replicas]
    while waiting and not is_interrupted():
        done, waiting = ray.wait(waiting, timeout=_WAIT_SECONDS)
        for pending in done:
            _result(pending, "before it had opened the bundle")


def _result(pending: Any, when: str) -> Any:
    """Return the result of a call, or raise its error."""
    try:
        return ray.get(pending)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise ClusterError(
            f"a replica ended {when}, and again after restarts ({first_line(error)}); if memory "
            "ran out use fewer --replicas or fewer beams for that line, else check that every node "
            "has this version of dsbd-ort; run the same command again to go on"
        ) from error
