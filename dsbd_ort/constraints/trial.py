"""Trial of grammars that strangers send: compiled in a process of its own first.

A small text can take a compiler minutes or gigabytes, or end its process: a schema may ask for
multiples of a prime of six digits, a grammar for rules that nest thousands deep. So a server has
each grammar compiled by a process that may take little of both, and takes over what that survives.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

from dsbd_ort.constraints import trial_worker
from dsbd_ort.constraints.matcher_pool import not_followed
from dsbd_ort.decoding.errors import ConstraintError

MOST_SECONDS = 1.0
"""Processor time of one grammar."""
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 18
"""Of a grammar in the language of the library."""
LIMITS = {"verbose_errors": False, "max_items_in_row": 500, "step_max_items": 10_000}
"""Below the library's own: masks are computed while other requests wait."""
_START_SECONDS = 60.0
_WALL = 60  # wall time per processor time, on a machine with much else to do


class GrammarTrial:
    """Tries grammars, one at a time. Safe to use from several threads."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int | None, eos_token_ids: Sequence[int] | None
    ) -> None:
        """Start nothing yet; the arguments are those of the library's tokenizer."""
        self._head = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": eos_token_ids and list(eos_token_ids),
            "limits": LIMITS,
            "most_bytes": MOST_BYTES + trial_worker.STACK_BYTES,
            "most_seconds": MOST_SECONDS,
        }
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def check(self, name: str, source: str) -> None:
        """Refuse a grammar that is invalid, or takes too much.

        Args:
            name: what the error calls it.
            source: in the language of the library.

        Raises:
            ConstraintError: it does.
        """
        if len(source) > MOST_CHARACTERS:
            raise ConstraintError(
                f"{name} amounts to {len(source)} characters; expected at most {MOST_CHARACTERS}: "
                "simplify it"
            )
        with self._lock:
            answer = self._answer(source)
        if answer is False:
            raise ConstraintError(
                f"{name} takes more than {MOST_SECONDS:g} s or {MOST_BYTES >> 20} MiB to compile; "
                "simplify it: smaller bounds and multiples, fewer and flatter alternatives"
            )
        if answer is not None:
            raise not_followed(name, answer)

    def close(self) -> None:
        """End the process; another ``check`` starts a new one."""
        with self._lock:
            self._end()

    def _answer(self, source: str) -> str | Literal[False] | None:
        """Return the error of a grammar, None without one, False where it takes too much."""
        if self._process is None:
            self._process = self._started()
        line = self._exchange(self._process, source, MOST_SECONDS * _WALL)
        if not line:
            self._end()
            return False
        answer: str | Literal[False] | None = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", str(Path(trial_worker.__file__))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if not self._exchange(process, self._head, _START_SECONDS):
            process.kill()
            process.wait()
            raise ConstraintError(
                f"grammars cannot be tried: {' '.join(command)} ended with {process.returncode}; "
                "run it to see why"
            )
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen[str], message: Any, seconds: float) -> str:
        """Send a message; return the line that answers it, nothing where none comes in time."""
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return _line(process.stdout, seconds)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _line(stream: IO[str], seconds: float) -> str:
    """Return the next line of a stream, nothing after so many seconds."""
    ready, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if ready else ""
