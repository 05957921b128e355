"""Make ready what the runs need: environments, conversions, bundles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peers.conversion import checkpoint_key, conversion_key, converted_folder
from peers.environment import environment_python
from peers.peer import Peer, PeerError, PeerRun
from peers.runner_process import RunnerProcess
from peers.runners.serve import Job

RUNNERS = Path(__file__).resolve().parent / "runners"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The checkpoints that every tool gets, and our bundle of them by precision."""

    target: Path
    draft: Path
    bundle_of: Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that can start: all that its process needs."""

    peer: Peer
    run: PeerRun
    python: Path
    job: Job

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what names the row."""
        return self.peer.name, self.run.name, self.run.precision


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """A run that cannot start or did not end well, and why."""

    peer: Peer
    run: PeerRun
    reason: str


def prepare(
    peer: Peer, pair: Pair, work: Path, checkout: Path | None, num_threads: int
) -> list[ReadyRun | NotRun]:
    """Return every run of a tool, ready or with the reason why not."""
    folder = work / peer.name.replace(" ", "-")
    try:
        if peer.source == "checkout" and checkout is None:
            raise PeerError("not run: no checkout of its code was given")
        python = Path(sys.executable)
        if peer.installs:
            python = environment_python(folder / "venv", peer.installs)
    except PeerError as error:
        return [NotRun(peer=peer, run=run, reason=str(error)) for run in peer.runs]
    runs: list[ReadyRun | NotRun] = []
    for precision in dict.fromkeys(run.precision for run in peer.runs):
        of_precision = [run for run in peer.runs if run.precision == precision]
        try:
            opened = _opened_folder(peer, precision, pair, folder, python, checkout, num_threads)
        except PeerError as error:
            reason = f"not converted: {error}"
            runs += [NotRun(peer=peer, run=run, reason=reason) for run in of_precision]
            continue
        runs += [
            ReadyRun(peer=peer, run=run, python=python, job=_job(pair, opened, run, num_threads))
            for run in of_precision
        ]
    return runs


def _opened_folder(
    peer: Peer,
    precision: str,
    pair: Pair,
    folder: Path,
    python: Path,
    checkout: Path | None,
    num_threads: int,
) -> Path:
    """Return what the runner opens beside the checkpoints, made when it is missing."""
    if peer.source == "bundle":
        return pair.bundle_of(precision)
    if peer.source == "checkout" and checkout is not None:
        return checkout.resolve()
    if peer.source == "checkpoints":
        return pair.target.parent
    checkpoints = checkpoint_key(pair.target, pair.draft)
    key = conversion_key(checkpoints, peer.installs, RUNNERS / f"{peer.runner}.py")

    def convert(partial: Path) -> None:
        print(f"+ {peer.name}: converting to {precision}", file=sys.stderr)
        nothing = PeerRun(name="conversion", precision=precision, task="")
        job = _job(pair, partial, nothing, num_threads)
        log = folder / "logs" / f"convert-{precision}.log"
        with RunnerProcess(python, peer.runner, job, log) as process:
            process.convert()

    return converted_folder(folder / "models" / f"{precision}-{key}", convert)


def _job(pair: Pair, folder: Path, run: PeerRun, num_threads: int) -> Job:
    return Job(
        target=str(pair.target.resolve()),
        draft=str(pair.draft.resolve()),
        folder=str(folder.resolve()),
        precision=run.precision,
        task=run.task,
        options=dict(run.options),
        num_threads=num_threads,
    )
