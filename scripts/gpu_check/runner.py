"""The processes of one piece, which share its time and write to its log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_check.results import PieceError

_COMMANDS = {  # by the name that a piece uses: what runs it, whether or not it is installed
    "dsbd-export": ("-c", "from dsbd_ort.cli import export; export()"),
    "dsbd-bench": ("-c", "from dsbd_ort.cli import bench; bench()"),
}
_LONGEST_REASON = 400


class Runner:
    """Runs commands until the time of its piece is used up."""

    def __init__(
        self,
        python: Path,
        scripts: Path,
        log: Path,
        environment: Mapping[str, str],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say how a command is started.

        Args:
            python: what runs our commands and modules.
            scripts: the folder with make_twin and the others.
            log: stdout and stderr of all commands are appended here.
            environment: of the processes, added to the one of this process.
            limit_s: seconds for all commands together.
            clock: seconds since some moment.
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
        """Run a module of ours in the environment."""
        self.run(self.python, "-m", name, *words)

    def run(self, *command: str | Path) -> None:
        """Run a command to its end.

        Raises:
            PieceError: it failed, with its last line, or the time is used up.
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
