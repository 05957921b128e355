"""Mixed load on a server: clients of several kinds, and response times by kind and status."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2
import numpy as np

from dsbd_ort.benchmark.bench_run import PROMPTS
from scripts.document_sections import table

MODEL = "soak"
PATH = "/v1/completions"
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"num_beams": 2, "top_k": 20},
    {"strategy": "speculative", "top_k": 20},
    {"strategy": "beam-sample", "num_beams": 2, "top_k": 20},
    {"temperature": 0},
    {"strategy": "speculative", "n": 2, "top_k": 20},
)
BAD_BODIES = (
    b"{",
    b"\xff\xfe\xfd",
    b"[]",
    b'{"model": "soak"}',
    b'{"model": "soak", "prompt": "a", "temperature": NaN}',
    b'{"model": "soak", "prompt": "a", "num_beams": 0}',
    b'{"model": "soak", "prompt": "a", "tools": [1]}',
    b'{"model": "soak", "prompt": ' + b"[" * 10_000,
)
WANTED = {  # allowed statuses of each kind; 429 occurs during bursts
    "plain": {"200", "429"},
    "stream": {"200", "429"},
    "wrong body": {"400"},
    "prompt too long": {"400"},
    "body too large": {"413"},
    "no such model": {"404"},
    "burst": {"200", "429"},
    "client gone, until noticed": {"gone"},
}


@dataclass
class Outcomes:
    """Response times in seconds by kind and status; threads may share it."""

    seconds_by_outcome: defaultdict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, status: str, seconds: float) -> None:
        """Record a request."""
        with self._lock:
            self.seconds_by_outcome[kind, status].append(seconds)

    def unwanted(self, wanted: dict[str, set[str]]) -> list[str]:
        """Return the outcomes with a status that is not in ``wanted`` for their kind."""
        return [
            f"{len(seconds)} x {kind}: {status}"
            for (kind, status), seconds in sorted(self.seconds_by_outcome.items())
            if status not in wanted[kind]
        ]

    def table(self) -> list[str]:
        """Return the lines of a table."""
        rows = []
        for (kind, status), seconds in sorted(self.seconds_by_outcome.items()):
            times = 1e3 * np.quantile(seconds, (0.5, 0.99, 1))
            rows.append((kind, status, str(len(seconds)), *(f"{ms:.1f}" for ms in times)))
        return table(["request", "status", "number", "p50 ms", "p99 ms", "longest ms"], rows)


Client = Callable[[httpx2.Client, Random, Outcomes], None]


def plain(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Request a few tokens."""
    _post(http, outcomes, "plain", json=_body(random, max_tokens=random.randint(1, 32)))


def stream(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Read a stream to its end."""
    began = time.monotonic()
    body = _body(random, max_tokens=random.randint(1, 64), stream=True)
    with http.stream("POST", PATH, json=body) as answer:
        *_, last = [line for line in answer.iter_lines() if line]
    is_cut = answer.status_code == 200 and last != "data: [DONE]"
    status = "cut short" if is_cut else str(answer.status_code)
    outcomes.add("stream", status, time.monotonic() - began)


def wrong_body(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Send an invalid body."""
    headers = {"Content-Type": "application/json"}
    content = random.choice(BAD_BODIES)
    _post(http, outcomes, "wrong body", content=content, headers=headers)


def prompt_too_long(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Send a prompt that exceeds the context."""
    body = {**_body(random), "prompt": "x y " * 20_000}
    _post(http, outcomes, "prompt too long", json=body)


def body_too_large(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Send a larger body than the server accepts."""
    _post(http, outcomes, "body too large", content=b"x" * 3_000_000)


def no_such_model(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Request another model."""
    _post(http, outcomes, "no such model", json={**_body(random), "model": "other"})


def burst(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Send more requests at a time than the server admits."""
    bodies = [_body(random, max_tokens=4) for _ in range(24)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        list(threads.map(lambda body: _post(http, outcomes, "burst", json=body), bodies))


def gone_client(http: httpx2.Client, random: Random, outcomes: Outcomes) -> None:
    """Disconnect during a stream; wait until the server has noticed.

    Only one such client may run at a time, because it waits for the server's count of cancelled
    requests to change.
    """
    before = _num_cancelled(http)
    body = _body(random, max_tokens=400, stream=True, eos_token_id=[])
    with http.stream("POST", PATH, json=body) as answer:
        if answer.status_code != 200:
            return  # rejected during a burst
        lines = answer.iter_lines()
        for _ in range(random.randint(1, 6)):
            next(lines)
    began = time.monotonic()
    while _num_cancelled(http) == before and time.monotonic() - began < 30:
        time.sleep(0.002)
    seconds = time.monotonic() - began
    status = "gone" if seconds < 30 else "not noticed"
    outcomes.add("client gone, until noticed", status, seconds)


# Weights with which clients are drawn.
MIX: dict[Client, int] = {
    plain: 40,
    stream: 25,
    wrong_body: 15,
    prompt_too_long: 5,
    body_too_large: 2,
    no_such_model: 5,
    burst: 2,
}


def _body(random: Random, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": random.choice(PROMPTS),
        "max_tokens": 16,
        "seed": random.randrange(1000),
        **random.choice(STRATEGIES),
        **fields,
    }


def _post(http: httpx2.Client, outcomes: Outcomes, kind: str, **request: Any) -> None:
    began = time.monotonic()
    status = str(http.post(PATH, **request).status_code)
    outcomes.add(kind, status, time.monotonic() - began)


def _num_cancelled(http: httpx2.Client) -> float:
    text = http.get("/metrics").text
    (line,) = (each for each in text.splitlines() if each.startswith("dsbd:requests_cancelled_t"))
    return float(line.rpartition(" ")[2])
