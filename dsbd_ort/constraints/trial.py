"""Trial of grammars that strangers send: compiled and followed in a process of its own first.

A small text can take a compiler minutes or gigabytes, or end its process: a schema may ask for
multiples of a prime of six digits, a grammar for rules that nest thousands deep. So a server has
each grammar tried by a process that may take little of both, and takes over what that survives.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.constraints import trial_worker
from dsbd_ort.constraints.matcher_pool import not_followed
from dsbd_ort.decoding.errors import ConstraintError

MOST_SECONDS = 1.0
"""Processor time of one grammar."""
MOST_BYTES = 256 << 20
MOST_CHARACTERS = 1 << 18
"""Of a grammar in the language of the library."""
LIMITS = {
    "verbose_errors": False,
    "max_items_in_row": 500,
    "step_max_items": 10_000,
    "max_lexer_states": 1 << 16,
}
"""Below the library's own: masks are computed while other requests wait, which takes 0.1 s at most
with so many items, and a state of the lexer takes 0.4 to 3 kB while its grammar is kept."""
_START_SECONDS = 60.0
_WALL = 60  # wall time per processor time, on a machine with much else to do
_MOST_TRIES = 2  # of one grammar: a process may have been ended by the system or a person
_log = logging.getLogger(__name__)


class GrammarTrialError(DsbdError):
    """No process could try a grammar; nothing is said of the grammar itself."""


class _WorkerLost(Exception):
    """The process ended, or gave no answer in time, whatever the grammar was."""


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

    def check(self, name: str, source: str, parts: Sequence[str] = ()) -> None:
        """Refuse a grammar that is invalid, cannot be followed, or takes too much.

        Args:
            name: what the error calls it.
            source: in the language of the library.
            parts: of the grammar, in that language, that paths from its beginning may not reach.

        Raises:
            ConstraintError: it does.
            GrammarTrialError: that could not be found out.
        """
        if len(source) > MOST_CHARACTERS:
            raise ConstraintError(
                f"{name} amounts to {len(source)} characters; expected at most {MOST_CHARACTERS}: "
                "simplify it"
            )
        with self._lock:
            verdict = self._verdict({"source": source, "parts": list(parts)})
        if verdict["took_too_much"]:
            raise ConstraintError(
                f"{name} takes more than {MOST_SECONDS:g} s or {MOST_BYTES >> 20} MiB to compile; "
                "simplify it: smaller bounds and multiples, fewer and flatter alternatives"
            )
        if verdict["error"] is not None:
            raise not_followed(name, verdict["error"])

    def close(self) -> None:
        """End the process; another ``check`` starts a new one."""
        with self._lock:
            self._end()

    def _verdict(self, grammar: dict[str, Any]) -> dict[str, Any]:
        """Return what the process says of a grammar; a lost process is replaced once."""
        for _ in range(_MOST_TRIES):
            if self._process is None:
                self._process = self._started()
            try:
                verdict: dict[str, Any] = _exchange(self._process, grammar, MOST_SECONDS * _WALL)
            except _WorkerLost as lost:
                _log.warning("the process that tries grammars %s; another is started", lost)
                self._end()
            except BaseException:
                self._end()  # what it has yet to say must not answer the next grammar
                raise
            else:
                if not verdict["was_killed"]:
                    return verdict
        raise GrammarTrialError(
            f"the process that tries grammars was lost {_MOST_TRIES} times; try again later"
        )

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", str(Path(trial_worker.__file__))]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise GrammarTrialError(
                f"the process that tries grammars cannot be started ({error.strerror}); "
                "try again later"
            ) from error
        try:
            _exchange(process, self._head, _START_SECONDS)
        except BaseException as error:
            _ended(process)
            if not isinstance(error, _WorkerLost):
                raise
            raise GrammarTrialError(
                f"the process that tries grammars {error} before it was ready; try again later, "
                f"or run {' '.join(command)} to see why"
            ) from error
        return process

    def _end(self) -> None:
        if self._process is not None:
            _ended(self._process)
            self._process = None


def _exchange(process: subprocess.Popen[str], message: Any, seconds: float) -> Any:
    """Send a message; return the answer."""
    assert process.stdin is not None and process.stdout is not None  # both are pipes
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise _WorkerLost("has ended") from None
    # ``select`` would refuse descriptors of 1,024 and more
    if not connection.wait([process.stdout.fileno()], seconds):
        raise _WorkerLost(f"gave no answer in {seconds:g} s")
    if not (line := process.stdout.readline()).endswith("\n"):
        raise _WorkerLost("has ended")
    return json.loads(line)


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
