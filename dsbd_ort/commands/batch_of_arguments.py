"""From the arguments of dsbd-run --input to a batch: who answers, and where the answers go."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dsbd_ort.batch.answer_source import AnswerSource, ThisProcess
from dsbd_ort.batch.errors import BatchError
from dsbd_ort.batch.job import Batch
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.batch.shared_calls import SharedCalls
from dsbd_ort.batch.workers import Workers

ANSWERS_FILE = "answers.jsonl"


def batch_of_arguments(
    settings: BatchSettings,
    console: Console,
    *,
    input: Path,
    output: Path,
    workers: int | None,
    concurrency: int | None,
    cluster: str | None,
    replicas: int | None,
) -> Batch:
    """Return the batch; with a cluster ``output`` is a folder, made where it is missing."""
    if cluster is None:
        local = _local_source(workers or 1, concurrency or 1)
        return Batch(input=input, output=output, settings=settings, source=local)
    source = _replicas(cluster, replicas or 1, console)
    return Batch(input=input, output=_file_in(output), settings=settings, source=source)


def _local_source(num_workers: int, num_requests: int) -> AnswerSource:
    if num_requests > 1:
        return SharedCalls(num_requests)
    return Workers(num_workers) if num_workers > 1 else ThisProcess()


def _replicas(cluster: str, num_replicas: int, console: Console) -> AnswerSource:
    try:  # here, not at the top: it brings Ray, which no other option needs
        from dsbd_ort.cluster.actor_pool import Replicas
    except ImportError as error:
        raise click.ClickException(
            f"--cluster needs a package that is not installed ({error.name}); "
            "run: pip install 'dsbd-ort[cluster]'"
        ) from error

    def report(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    return Replicas(address=cluster, num_replicas=num_replicas, report=report)


def _file_in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BatchError(
            f"--output {folder} cannot be made ({error.strerror}); with --cluster it is a folder, "
            f"which gets {ANSWERS_FILE}"
        ) from error
    return folder / ANSWERS_FILE
