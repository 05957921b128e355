"""A runner in a separate process, with one request at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Protocol

from lab.peers.catalog import PeerError
from lab.peers.runners.serve import Asked

ROOT = Path(__file__).resolve().parents[2]


class RunnerJob(Protocol):
    """A dataclass that describes what a runner opens; its fields are sent to the runner."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def num_threads(self) -> int:
        """Threads of the tool."""


class RunnerProcess:
    """The process of a runner: a context manager whose exit ends the process."""

    def __init__(
        self,
        python: Path,
        runner: str,
        job: RunnerJob,
        log: Path,
        *,
        package: str = "lab.peers.runners",
        import_from: Sequence[Path] = (ROOT,),
        timeout_s: float = 900.0,
    ) -> None:
        """Set the command of the process.

        Args:
            python: interpreter of the tool's environment.
            runner: module in ``package``.
            package: package of the runners.
            job: what ``convert`` and ``open`` send.
            log: file for the stderr of the process.
            import_from: folders that hold ``package`` and lab.
            timeout_s: maximum seconds for one answer.
        """
        self._command = [str(python), "-m", f"{package}.{runner}"]
        self._job = job
        self._log = log
        self._timeout_s = timeout_s
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, import_from)),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(job.num_threads),
        }

    def __enter__(self) -> RunnerProcess:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._stderr: BinaryIO = self._log.open("wb")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=self._environment,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        try:
            with contextlib.suppress(BrokenPipeError):  # the process ended before it read a request
                self._process.__exit__(kind, error, trace)
        finally:
            self._stderr.close()

    def convert(self) -> None:
        """Let the tool convert the checkpoints into the job's folder."""
        self.ask("convert", dataclasses.asdict(self._job))

    def open(self) -> dict[str, Any]:
        """Load the models; return version and settings."""
        return self.ask("open", dataclasses.asdict(self._job))

    def generate(self, asked: Asked) -> dict[str, Any]:
        """Run one request; return its token_ids, num_iterations, seconds, peak_bytes and others."""
        return self.ask("generate", dataclasses.asdict(asked))

    def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a verb of the runner's protocol and return the answer.

        Raises:
            PeerError: the process gave no answer, or the answer is an error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None  # pipes
        timer = threading.Timer(self._timeout_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({verb: arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        if timed_out:
            raise PeerError(f"{verb}: no answer within {self._timeout_s:g} s")
        if not line:
            raise PeerError(f"{verb}: the process ended ({self._last_words()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{verb}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """Return the exit code and the last line of stderr."""
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")
