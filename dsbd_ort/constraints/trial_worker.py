"""The process that compiles grammars for trial: run as a file, it imports llguidance alone.

It reads JSON lines: a tokenizer and the limits first, then one grammar a line. For each it writes
a line: null, the error, or false where the grammar ended the child that compiled it, which may take
so much processor time and memory. A child costs milliseconds, reading a large tokenizer seconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

STACK_BYTES = 256 << 20
"""Of the thread that compiles: the library goes as deep as the rules of a grammar."""


def run() -> None:
    """Answer until the input ends."""
    import llguidance  # here: the constant above is imported by the parent

    head = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(
        head["tokenizer"], n_vocab=head["vocab_size"], eos_token=head["eos_token_ids"]
    )
    limits = llguidance.LLParserLimits(**head["limits"])
    os.nice(5)  # requests that are being answered come before those that are tried
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("true", flush=True)
    for line in sys.stdin:
        child = os.fork()  # safe: no other thread runs between two grammars
        if not child:
            _bound(head["most_seconds"], head["most_bytes"])
            error = _tried(llguidance, tokenizer, json.loads(line), limits)
            print(json.dumps(error), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("false", flush=True)


def _bound(most_seconds: float, most_bytes: int) -> None:
    """Let this process end once it takes more processor time or memory from here on."""
    signal.setitimer(signal.ITIMER_PROF, most_seconds)  # SIGPROF ends it
    if used := _address_space():
        resource.setrlimit(resource.RLIMIT_AS, (used + most_bytes, used + most_bytes))


def _tried(library: Any, tokenizer: Any, source: str, limits: Any) -> str | None:
    """Return the error of a grammar and of its first mask, None without one."""
    found: list[str] = []

    def compile_it() -> None:
        matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            found.append(matcher.get_error())

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    return found[0] if found else None


def _address_space() -> int | None:
    """Return the bytes that this process has mapped, None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    run()
