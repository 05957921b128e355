"""Preparation of the runs: environments, converted checkpoints, bundles."""

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.peers.catalog import Peer, PeerError, PeerRun
from lab.peers.runner_process import RunnerProcess
from lab.peers.runners.serve import Job

RUNNERS = Path(__file__).resolve().parent / "runners"

_PATTERNS = ("*.safetensors", "config.json", "tokenizer.json")
_KEY_LENGTH = 12

_STAMP = ".installed"
_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The checkpoints that every tool gets; ``bundle_of`` returns our bundle of a precision."""

    target: Path
    draft: Path
    bundle_of: Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that can start, with all that its process needs."""

    peer: Peer
    run: PeerRun
    python: Path
    job: Job

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the tool, the run and the precision, which identify the row."""
        return self.peer.name, self.run.name, self.run.precision


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """A run that failed or cannot start, with the reason."""

    peer: Peer
    run: PeerRun
    reason: str


def prepare(peer: Peer, pair: Pair, work: Path, num_threads: int) -> list[ReadyRun | NotRun]:
    """Return every run of a tool: ready, or with the reason why it cannot start."""
    unable = [
        NotRun(peer=peer, run=run, reason=run.unable) for run in peer.runs if run.unable is not None
    ]
    able = tuple(run for run in peer.runs if run.unable is None)
    if not able:
        return [*unable]
    peer = dataclasses.replace(peer, runs=able)
    return [*unable, *_prepared(peer, pair, work, num_threads)]


def _prepared(peer: Peer, pair: Pair, work: Path, num_threads: int) -> list[ReadyRun | NotRun]:
    """Prepare the runs that are not marked ``unable``."""
    folder = work / peer.name.replace(" ", "-")
    try:
        python = Path(sys.executable)
        if peer.installs:
            python = environment_python(folder / "venv", peer.installs)
    except PeerError as error:
        return [NotRun(peer=peer, run=run, reason=str(error)) for run in peer.runs]
    runs: list[ReadyRun | NotRun] = []
    for precision in dict.fromkeys(run.precision for run in peer.runs):
        of_precision = [run for run in peer.runs if run.precision == precision]
        try:
            opened = _opened_folder(peer, precision, pair, folder, python, num_threads)
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
    num_threads: int,
) -> Path:
    """Return the folder that the runner opens; a missing conversion is created."""
    if peer.source == "bundle":
        return pair.bundle_of(precision)
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


def checkpoint_key(*checkpoints: Path) -> str:
    """Return a hash of the weights, configs and tokenizers of checkpoints."""
    digest = hashlib.sha256()
    for checkpoint in checkpoints:
        files = [file for pattern in _PATTERNS for file in sorted(checkpoint.glob(pattern))]
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:_KEY_LENGTH]


def conversion_key(checkpoints: str, installs: Sequence[Sequence[str]], converter: Path) -> str:
    """Return a hash of all that a conversion depends on: checkpoints, versions, program."""
    words = "\n".join(" ".join(words) for words in installs)
    digest = hashlib.sha256(f"{checkpoints}\n{words}\n".encode() + converter.read_bytes())
    return digest.hexdigest()[:_KEY_LENGTH]


def converted_folder(folder: Path, convert: Callable[[Path], None]) -> Path:
    """Return ``folder``, filled by ``convert`` if missing; a partial folder never stays."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            convert(partial)
            partial.rename(folder)
    return folder


def environment_python(folder: Path, installs: Sequence[Sequence[str]]) -> Path:
    """Return the Python of the environment in ``folder``, created again if ``installs`` changed.

    Raises:
        PeerError: the environment cannot be created.
    """
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = "\n".join(" ".join(words) for words in installs)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    for words in installs:
        _call(*pip, "install", "--quiet", *words)
    stamp.write_text(wanted)
    return python


def _call(*command: str) -> None:
    print("+", *command, file=sys.stderr)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"not installed: {' '.join(command)} took over {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise PeerError(f"not installed: {errors[0] if errors else f'exit {done.returncode}'}")
