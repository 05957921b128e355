"""The process that compiles grammars for trial; run as a file, it imports only llguidance.

It reads JSON lines: first a tokenizer and the limits, then one grammar per line, with parts of it
that are followed as well. For each grammar it writes a verdict: the error, if any, whether the
child process exceeded the CPU time or memory, and whether the child was killed from outside.
Each grammar gets a new child process, which costs milliseconds, while reading a large tokenizer
takes seconds.
"""

import functools
import json
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STACK_BYTES = 256 << 20
"""Stack of the thread that compiles: the library recurses as deep as a grammar's rules nest."""
_ENDS = tuple('"{}[]:,()\n ')
_NUM_PATHS = 4
_PATH_MASKS = 8  # masks of a path; a mask costs a millisecond, forced tokens almost nothing


def run() -> None:
    """Answer until the input ends."""
    import llguidance  # here: the constant above is imported by the parent

    head = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(
        head["tokenizer"], n_vocab=head["vocab_size"], eos_token=head["eos_token_ids"]
    )
    limits = llguidance.LLParserLimits(**head["limits"])
    os.nice(5)  # running requests have priority over trials
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("true", flush=True)
    for line in sys.stdin:
        trial = functools.partial(_tried, llguidance, tokenizer, limits, head, json.loads(line))
        print(json.dumps(_verdict(trial)), flush=True)


def _verdict(trial: Callable[[], str | None]) -> dict[str, Any]:
    """Try a grammar in a child process; return its error, or how the child ended."""
    reading, writing = os.pipe()
    child = os.fork()  # safe: no other thread runs between two grammars
    if not child:
        answer = json.dumps(trial())
        with os.fdopen(writing, "w") as stream:
            stream.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    status = os.waitpid(child, 0)[1]
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {
        "error": json.loads(answer) if not status else None,
        "took_too_much": bool(status) and not was_killed,
        "was_killed": was_killed,
    }


def _tried(
    library: Any, tokenizer: Any, limits: Any, head: Mapping[str, Any], grammar: Mapping[str, Any]
) -> str | None:
    errors: list[str | None] = []

    def try_it() -> None:
        matcher = library.LLMatcher(tokenizer, grammar["source"], log_level=0, limits=limits)
        errors.append(error_in_following(library, tokenizer, matcher, grammar["parts"], limits))

    signal.setitimer(signal.ITIMER_PROF, head["most_seconds"])  # SIGPROF ends this process
    if used := _address_space():
        max_bytes = used + head["most_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return errors[0]


def error_in_following(
    library: Any, tokenizer: Any, matcher: Any, parts: Sequence[str], limits: Any
) -> str | None:
    """Return the error of a grammar on some short paths, None if all succeed.

    ``matcher`` is not changed. A grammar may exceed a limit only after its first tokens: an object
    of a schema may have more optional properties than a position can hold. So ``parts``, which
    short paths may not reach, are followed too. A part that is not a grammar by itself is skipped.
    """
    error = _error_on_paths(matcher, tokenizer)
    for source in parts if error is None else ():
        part = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not part.is_error():
            error = error or _error_on_paths(part, tokenizer)
    return error


def _error_on_paths(matcher: Any, tokenizer: Any) -> str | None:
    """Follow random paths; half of the draws prefer tokens that end a string, list or object."""
    if matcher.is_error():
        return str(matcher.get_error())
    ends = [token for mark in _ENDS for token in tokenizer.greedy_tokenize(mark)[:1]]
    end_ids = frozenset(tokenizer.eos_tokens)
    for seed in range(_NUM_PATHS):
        draw = random.Random(seed)
        path = matcher.deep_copy()
        for _ in range(_PATH_MASKS):
            token = _drawn(path.compute_bitmask(), ends, end_ids, draw)
            if path.is_error() or token is None or not path.try_consume_tokens([token]):
                break
            path.try_consume_tokens(path.compute_ff_tokens())
        if path.is_error():
            return str(path.get_error())
    return None


def _drawn(
    mask: bytes, ends: list[int], end_ids: frozenset[int], draw: random.Random
) -> int | None:
    preferred = [token for token in ends if mask[token // 8] >> token % 8 & 1]
    if preferred and draw.random() < 0.5:
        return draw.choice(preferred)
    first = draw.randrange(len(mask))
    for step in range(len(mask)):
        index = (first + step) % len(mask)
        if mask[index]:
            tokens = [8 * index + bit for bit in range(8) if mask[index] >> bit & 1]
            if tokens := [token for token in tokens if token not in end_ids]:
                return draw.choice(tokens)
    return None


def _address_space() -> int | None:
    """Return the bytes that this process has mapped, None if the system does not report them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    run()
