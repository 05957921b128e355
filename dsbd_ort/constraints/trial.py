"""Trial of untrusted grammars: first compiled and followed in a separate process.

A small grammar can cost a compiler minutes or gigabytes, or crash its process: for example one with
multiples of a prime of six digits, or with rules nested thousands deep. So a server tries each
grammar in a process with limits of time and memory, and uses it only if that process survives.
"""

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from dsbd_errors import DsbdError
from dsbd_ort.constraints import trial_worker
from dsbd_ort.constraints.matcher_pool import not_followed
from dsbd_ort.decoding.errors import ConstraintError

MOST_SECONDS = 1.0  # CPU time of one grammar
MOST_BYTES = 256 << 20
MOST_CHARACTERS = 1 << 18  # of a grammar in the language of the library
LIMITS = {
    "verbose_errors": False,
    "max_items_in_row": 500,
    "step_max_items": 10_000,
    "max_lexer_states": 1 << 16,
}
"""Lower than the library's limits. Other requests wait while masks are computed; with these limits
that takes 0.1 s at most. A state of the lexer uses 0.4 to 3 kB as long as its grammar is kept."""
_START_SECONDS = 60.0
_WALL = 60  # wall time per CPU time, on a busy machine
_MOST_TRIES = 2  # of one grammar: the system or a person may have killed the process
_log = logging.getLogger(__name__)


class GrammarTrialError(DsbdError):
    """No process could try a grammar; the grammar itself may be valid."""


class _WorkerLost(Exception):
    """The process ended or gave no answer in time, independently of the grammar."""


class GrammarTrial:
    """Tries grammars, one at a time. Safe to use from several threads."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int | None, eos_token_ids: Sequence[int] | None
    ) -> None:
        self._head = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": eos_token_ids and list(eos_token_ids),
            "limits": LIMITS,
            "most_bytes": MOST_BYTES + trial_worker.STACK_BYTES,
            "most_seconds": MOST_SECONDS,
        }
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False  # whether the process has read the tokenizer
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, which then reads the tokenizer; ``check`` reports its errors."""
        with self._lock, contextlib.suppress(GrammarTrialError):
            self._started()

    def check(self, name: str, source: str, parts: Sequence[str] = ()) -> None:
        """Refuse a grammar that is invalid, cannot be followed, or exceeds the limits.

        parts: parts of the grammar, in the language of ``source``, that short paths may not reach.
        GrammarTrialError: the trial itself failed.
        """
        if len(source) > MOST_CHARACTERS:
            raise ConstraintError(
                f"{name} has {len(source)} characters as a grammar; expected at most "
                f"{MOST_CHARACTERS}: simplify it"
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
        with self._lock:
            self._end()

    def _verdict(self, grammar: dict[str, Any]) -> dict[str, Any]:
        """Return the process's answer for a grammar; if the process is lost, try another once."""
        for _ in range(_MOST_TRIES):
            process = self._ready()
            try:
                _send(process, grammar)
                verdict: dict[str, Any] = _answer(process, MOST_SECONDS * _WALL)
            except _WorkerLost as lost:
                _log.warning("the process that tries grammars %s; another is started", lost)
                self._end()
            except BaseException:
                self._end()  # its late answer must not be read for the next grammar
                raise
            else:
                if not verdict["was_killed"]:
                    return verdict
        raise GrammarTrialError(
            f"the process that tries grammars was lost {_MOST_TRIES} times; try again later"
        )

    def _ready(self) -> subprocess.Popen[str]:
        process = self._started()
        if not self._is_ready:
            with self._starting():
                _answer(process, _START_SECONDS)
            self._is_ready = True
        return process

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        command = [sys.executable, "-P", str(Path(trial_worker.__file__))]
        try:
            self._process = subprocess.Popen(
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
        with self._starting():
            _send(self._process, self._head)
        return self._process

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """End the process if the block fails."""
        try:
            yield
        except BaseException as error:
            self._end()
            if not isinstance(error, _WorkerLost):
                raise
            raise GrammarTrialError(
                f"the process that tries grammars {error} before it was ready; try again later, "
                f"or run {sys.executable} -P {trial_worker.__file__} to see why"
            ) from error

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._is_ready = None, False


def _send(process: subprocess.Popen[str], message: Any) -> None:
    assert process.stdin is not None  # a pipe
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise _WorkerLost("has ended") from None


def _answer(process: subprocess.Popen[str], seconds: float) -> Any:
    assert process.stdout is not None  # a pipe
    # ``select`` would refuse descriptors of 1,024 and more
    if not connection.wait([process.stdout.fileno()], seconds):
        raise _WorkerLost(f"gave no answer in {seconds:g} s")
    if not (line := process.stdout.readline()).endswith("\n"):
        raise _WorkerLost("has ended")
    return json.loads(line)
