"""Answer lines by replicas on a Ray cluster.

Ray places the actors, restarts one that ended, on another node if need be, and calls it again for
the line that it had; here a replica gets the next line as soon as it is free. That is all there is
to schedule, so it needs no Ray Data: a data set would hand results over by blocks, of which a lost
one is done again as a whole, and would want pandas on every node.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from dsbd_ort.batch.line_answer import LineAnswer
from dsbd_ort.batch.pool import answers_in_order
from dsbd_ort.batch.prompt_line import RawLine
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.cluster.connection import connected, first_line, node_rooms
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.cluster.replica import Replica
from dsbd_ort.cluster.room import ReplicaShare, num_gpus, replica_share

_MAX_RESTARTS = 10  # of a replica: one that cannot even start must not go on forever
_MAX_RETRIES = 3  # of a line: one that ends its replica must not end them all
_WAIT_SECONDS = 0.2  # how long a wish to end may go unheard


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Actors on a Ray cluster.

    ``answers`` raises ClusterError where the cluster cannot be used, a replica cannot open the
    bundle, or one ends again and again.

    Attributes:
        address: of the cluster, see ``connected``.
        num_replicas: how many pipelines there are.
        report: is told which cluster it is and what a replica gets.
    """

    address: str
    num_replicas: int
    report: Callable[[str], None]

    def answers(
        self,
        settings: BatchSettings,
        fingerprint: str,
        lines: Iterator[RawLine],
        is_interrupted: Callable[[], bool],
    ) -> Generator[LineAnswer, None, None]:
        """See AnswerSource."""
        with connected(self.address, self.report):
            share = self._share(settings)
            self.report(
                f"replicas: {self.num_replicas}, threads of each: {share.num_threads}; they start "
                "as soon as the cluster has room"
            )
            replicas = self._started(settings, fingerprint, share)
            _wait_until_open(replicas, is_interrupted)
            yield from answers_in_order(_ReplicaPool(replicas), lines, is_interrupted)

    def _share(self, settings: BatchSettings) -> ReplicaShare:
        gpus = num_gpus(settings.pipeline)
        if (num_threads := settings.pipeline.num_threads) is not None:
            return ReplicaShare(max(1, num_threads // self.num_replicas), gpus)
        return replica_share(node_rooms(), self.num_replicas, gpus)

    def _started(
        self, settings: BatchSettings, fingerprint: str, share: ReplicaShare
    ) -> list[ActorHandle[Replica]]:
        pipeline = replace(
            settings.pipeline,
            bundle=settings.pipeline.bundle.absolute(),  # replicas work in folders of Ray's
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
    """See Pool."""

    def __init__(self, replicas: list[ActorHandle[Replica]]) -> None:
        self.num_members = len(replicas)
        self._idle = list(replicas)
        self._busy: dict[Any, tuple[ActorHandle[Replica], int, RawLine]] = {}  # by awaited answer

    def has_idle(self) -> bool:
        return bool(self._idle)

    def send(self, index: int, line: RawLine) -> None:
        replica = self._idle.pop()
        self._busy[replica.answer.remote(line)] = (replica, index, line)

    def receive(self, seconds: float) -> list[tuple[int, LineAnswer]]:
        done, _ = ray.wait(list(self._busy), timeout=seconds)
        answers = []
        for awaited in done:
            replica, index, line = self._busy.pop(awaited)
            self._idle.append(replica)
            answers.append((index, _got(awaited, f"at line {line.number} of the input")))
        return answers


def _wait_until_open(
    replicas: list[ActorHandle[Replica]], is_interrupted: Callable[[], bool]
) -> None:
    waiting: list[Any] = [replica.check.remote() for replica in replicas]
    while waiting and not is_interrupted():
        done, waiting = ray.wait(waiting, timeout=_WAIT_SECONDS)
        for awaited in done:
            _got(awaited, "before it had opened the bundle")


def _got(awaited: Any, when: str) -> Any:
    """Return what a replica returned, raise what it raised."""
    try:
        return ray.get(awaited)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise ClusterError(
            f"a replica ended {when}, and again after restarts ({first_line(error)}); if memory "
            "ran out give fewer --replicas or that line fewer beams, else see that every node has "
            "this version of dsbd-ort; run the same command again to go on"
        ) from error
