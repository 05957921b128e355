"""Replicas on a Ray cluster that answer the lines of a batch.

Ray places the actors. It restarts an actor that ended, on another node if necessary, and repeats
the call for its line. An idle replica gets the next line.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
    usable_cores,
)
from dsbd_ort.batch.prompt_lines import BatchSettings, LineAnswer, RawLine
from dsbd_ort.cluster.replica import ClusterError, Replica, cores_of_replica, num_gpus

_MAX_RESTARTS = 10  # per replica: one that cannot start must not be restarted for ever
_MAX_RETRIES = 3  # per line: a line that kills its replica must not kill all replicas
_ADDRESS = re.compile(r"(?:ray://)?\[?([^/\[\]]+)\]?:([0-9]+)")
_CONNECT_SECONDS = 5.0
_STORE_BYTES = 100_000_000  # lines and answers pass through it, never weights


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """AnswerSource: actors on a Ray cluster.

    A call raises ClusterError if the cluster cannot be used, or a replica cannot open the bundle or
    ends again and again.

    address: address of the cluster, see ``connected``.
    report: called with lines that name the cluster and the resources of a replica.
    """

    address: str
    num_replicas: int
    report: Callable[[str], None]

    def __call__(self, backlog: Backlog) -> Answers:
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
        of_replica = replace(settings, pipeline=pipeline)
        return [actor.remote(of_replica, fingerprint) for _ in range(self.num_replicas)]


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
            f"({_cause(error)}); if memory ran out use fewer --replicas or fewer beams for "
            "that line, else check that every node has this version of dsbd-ort; run the same "
            "command again to go on"
        ) from error


@contextlib.contextmanager
def connected(address: str, report: Callable[[str], None]) -> Iterator[None]:
    """Connect to a cluster while the block runs; ClusterError: it is lost or unreachable.

    address: see ``resolved_address``. If "auto" finds no cluster, one is started on this machine,
        and ended after the block.
    """
    # Ray prints messages of its workers to stdout, which is for results.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            on_sigterm = signal.getsignal(signal.SIGTERM)
            report(_connect(address))
            signal.signal(signal.SIGTERM, on_sigterm)  # in place of Ray's, which ends the process
            yield
        except ConnectionError as error:
            raise ClusterError(
                f"the connection to the Ray cluster was lost ({_cause(error)}); run the same "
                "command again to go on"
            ) from error
        finally:
            ray.shutdown()


def _cause(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _connect(given: str) -> str:
    address = resolved_address(given, os.environ)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray has no argument for it
        quiet |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        ray.init("local", num_cpus=usable_cores(), **quiet)
        return "no Ray cluster runs here: started one on this machine for this run"
    try:
        ray.init(given, **quiet)
    except Exception as error:  # many types, not documented
        raise ClusterError(
            f"the Ray cluster at {address} refuses this machine ({_cause(error)}); it requires "
            "the same versions of Ray and Python, RAY_AUTH_MODE=token and its token if it has one, "
            "and for HOST:PORT that this machine is a node: else use ray://HOST:10001"
        ) from error
    return f"the Ray cluster at {address}"


def resolved_address(given: str, environment: Mapping[str, str]) -> str | None:
    """Return the address of a cluster that answers; None if "auto" finds no cluster.

    Ray would look in the same places, but tries for minutes to reach an address without a cluster.

    given: "auto", "host:port" or "ray://host:port".
    environment: its variables RAY_ADDRESS and RAY_TMPDIR are read.
    ClusterError: a given address is invalid, or nothing listens there.
    """
    address, source = given, f"--cluster {given}"
    if given == "auto":
        address = environment.get("RAY_ADDRESS", "")
        source = f"RAY_ADDRESS {address}"
        if address == "local":
            return None
        if not address:  # ``ray start`` writes its address to this file; a crash leaves it there
            file = Path(environment.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
            address = file.read_text().strip() if file.is_file() else ""
            return address if address and _listens(address, str(file)) else None
    if not _listens(address, source):
        raise ClusterError(
            f"{source}: nothing listens there; start a cluster with 'ray start --head', correct "
            "the address, or use --cluster auto"
        )
    return address


def _listens(address: str, source: str) -> bool:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ClusterError(
            f"{source} is not an address of a Ray cluster; expected auto, HOST:PORT or "
            "ray://HOST:PORT, as in 10.0.0.5:6379"
        )
    try:
        socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError):  # OverflowError: no such port
        return False
    return True
