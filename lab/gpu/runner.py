"""Runner of one piece: its processes share a time limit and a log; its result is a JSON file."""

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COMMANDS = {  # arguments of Python by command: scripts need not be installed
    "dsbd-export": ("-c", "from dsbd_ort.cli import export; export()"),
    "dsbd-bench": ("-c", "from dsbd_ort.cli import bench; bench()"),
    "dsbd-distill": ("-c", "from dsbd_ort.cli import distill; distill()"),
    "widen-feature-draft": (
        "-c",
        "import sys, transformers as t; from pathlib import Path; "
        "from scripts.twin.feature_draft import widen_feature_draft; draft, target, to = "
        "sys.argv[1:]; "
        "widen_feature_draft(Path(draft), t.LlamaConfig.from_pretrained(target), Path(to))",
    ),
}
_LONGEST_REASON = 400

DONE, FAILED, NOT_RUN = "done", "failed", "not run"


class Runner:
    """Runs the commands of a piece within the piece's time limit."""

    def __init__(
        self,
        python: Path,
        scripts: Path,
        log: Path,
        environment: Mapping[str, str],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set how commands are run.

        Args:
            python: interpreter for our commands and modules.
            scripts: folder of make_twin and the other scripts.
            log: file to which stdout and stderr of all commands are appended.
            environment: variables added to this process's own for the commands.
            limit_s: time limit for all commands together, seconds.
            clock: returns seconds since a fixed moment.
        """
        self.python = python
        self._scripts = scripts
        self._log = log
        self._environment = {**os.environ, **environment}
        self._limit_s = limit_s
        self._clock = clock
        self._ends = clock() + limit_s

    def command(self, name: str, *words: str | Path) -> None:
        """Run one of our commands: dsbd-export, dsbd-bench, or a script such as make_twin."""
        how = _COMMANDS.get(name, (str(self._scripts / name),))
        self.run(self.python, *how, *words)

    def module(self, name: str, *words: str | Path) -> None:
        """Run one of our modules with ``python -m``."""
        self.run(self.python, "-m", name, *words)

    def run(self, *command: str | Path) -> None:
        """Run a command to its end.

        Raises:
            PieceError: the command failed (the message has its last line) or the time is used up.
        """
        words = [str(word) for word in command]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            log.write(f"+ {' '.join(words)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # so that its children end with it
            )
            try:
                code = process.wait(timeout=max(self._ends - self._clock(), 0.0))
            except subprocess.TimeoutExpired as error:
                raise PieceError(f"took over {self._limit_s:.0f} s, see {self._log}") from error
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code != 0:
            raise PieceError(f"exit code {code}: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines[-20:] if line.startswith(("Error:", "ERROR:"))]
        return (errors or lines)[-1].strip()[:_LONGEST_REASON]


class PieceError(Exception):
    """A piece failed; the message is the reason, in one line.

    Attributes:
        values: measurements that were complete before.
    """

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


class NotRunError(Exception):
    """A piece does not apply to this machine or these settings; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one piece.

    Attributes:
        piece: its name.
        state: ``DONE``, ``FAILED`` or ``NOT_RUN``.
        reason: why the piece is not done; empty if it is done.
        seconds: duration.
        began: time of the start, ISO 8601, UTC.
        values: measurements by name; of a failed piece those that were complete before.
    """

    piece: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    began: str = ""
    values: dict[str, Any] = field(default_factory=dict)


class ResultFile:
    """The results of a check: one JSON file, written again after every piece."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, result: Result) -> None:
        """Store a result; it replaces an earlier one of the same piece."""
        others = [each for each in self.all() if each.piece != result.piece]
        write_json(self._file, [dataclasses.asdict(each) for each in (*others, result)])

    def read(self, piece: str) -> Result | None:
        """Return the result of a piece, None if it has none."""
        return next((result for result in self.all() if result.piece == piece), None)

    def all(self) -> list[Result]:
        """Return all results, ordered by start time."""
        entries = json.loads(self._file.read_text()) if self._file.exists() else []
        return sorted((Result(**each) for each in entries), key=lambda result: result.began)


def write_json(file: Path, content: object) -> None:
    """Write a JSON file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.rename(file)
