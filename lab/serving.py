"""Speed-up by sharing engine calls between concurrent requests.

dsbd-serve on each of BUNDLES gets the same requests one after another and all at a time, in turn; a
round has both. Prompts are computed again every time (--no-prefix-cache).
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx2
from rich.progress import track

from dsbd_ort.benchmark.bench_run import PROMPTS
from dsbd_ort.benchmark.bootstrap import bootstrap, spread
from lab.frame.page import BUNDLES, RESULTS, Page, ratio_cell, spread_cell, writes
from lab.frame.rounds import turn
from lab.frame.server_process import MODEL, client_of
from scripts.document_sections import table

FIXED: dict[str, Any] = {"strategy": "dsbd", "width_policy": "fixed"}
RUNS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample"},
    "speculative, 4": {"strategy": "speculative", "draft_length": 4},
    "speculative, throughput": {"strategy": "speculative", "draft_policy": "throughput"},
    "beam-sample W=2": {"strategy": "beam-sample", "num_beams": 2},
    "dsbd W=2, 4x2": {**FIXED, "num_beams": 2, "draft_length": 4, "draft_beams": 2},
    "dsbd W=2, 2x2": {**FIXED, "num_beams": 2, "draft_length": 2, "draft_beams": 2},
    "dsbd W=2, throughput": {**FIXED, "num_beams": 2, "draft_policy": "throughput"},
    "dsbd W=4, 2x6": {**FIXED, "num_beams": 4, "draft_length": 2, "draft_beams": 6},
}
Answer = dict[str, Any]


@dataclass
class Found:
    """Tokens per second of every round, both ways; number of requests with the same tokens."""

    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    num_same: int = 0
    num_requests: int = 0


def is_same(one: Answer, other: Answer) -> bool:
    """Return whether two answers have the same tokens."""
    (a,), (b,) = one["choices"], other["choices"]
    return bool(a["text"] == b["text"] and a["logprobs"]["tokens"] == b["logprobs"]["tokens"])


def timed(http: httpx2.Client, bodies: list[Answer], at_a_time: int) -> tuple[float, list[Answer]]:
    """Send the requests; return tokens per second and the answers."""

    def answer(body: Answer) -> Answer:
        content: Answer = http.post("/v1/completions", json=body).raise_for_status().json()
        return content

    with ThreadPoolExecutor(at_a_time) as threads:
        began = time.perf_counter()
        answers = list(threads.map(answer, bodies))
        seconds = time.perf_counter() - began
    return sum(each["usage"]["completion_tokens"] for each in answers) / seconds, answers


def measure(
    http: httpx2.Client, num_requests: int, rounds: int, max_new_tokens: int
) -> dict[str, Found]:
    """Return the measurements by run; a warm-up round comes first."""
    measurements = {name: Found() for name in RUNS}
    for number in track(range(-1, rounds), description="rounds", transient=True):
        for name, options in RUNS.items():
            bodies = [
                {
                    "model": MODEL,
                    "prompt": PROMPTS[index % len(PROMPTS)],
                    "seed": num_requests * (number + 1) + index,
                    "max_tokens": max_new_tokens,
                    "eos_token_id": [],  # all have the same number of tokens
                    "top_k": 20,
                    "logprobs": 0,
                    **options,
                }
                for index in range(num_requests)
            ]
            speeds, answers = {}, {}
            for at_a_time in turn((1, num_requests), number):
                speeds[at_a_time], answers[at_a_time] = timed(http, bodies, at_a_time)
            if number < 0:
                continue
            measurements[name].alone.append(speeds[1])
            measurements[name].together.append(speeds[num_requests])
            pairs = zip(answers[1], answers[num_requests], strict=True)
            measurements[name].num_same += sum(is_same(*pair) for pair in pairs)
            measurements[name].num_requests += num_requests
    return measurements


def rows_of(measurements: dict[str, Found]) -> Iterator[tuple[str, ...]]:
    """Yield a row per run; the gain is the median of the rounds' ratios."""
    for name, here in measurements.items():
        speeds = [spread_cell(spread(values)) for values in (here.alone, here.together)]
        ratios = [b / a for a, b in zip(here.alone, here.together, strict=True)]
        gain = ratio_cell(bootstrap(ratios, "median"))
        yield name, *speeds, gain, f"{here.num_same}/{here.num_requests}"


@click.command(help=__doc__)
@BUNDLES
@click.option("--requests", "num_requests", default=8, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--max-new-tokens", default=48, show_default=True)
@writes(RESULTS / "serving.md")
def main(
    bundles: tuple[Path, ...],
    num_requests: int,
    rounds: int,
    max_new_tokens: int,
    page: Page,
) -> None:
    """Measure every bundle and write the tables into the page."""
    page.begin("serving")
    options = ("--no-prefix-cache", "--max-requests", num_requests)
    together = f"{num_requests} at a time, tokens/s"
    columns = ("run", "one after another, tokens/s", together, "gain", "same tokens")
    lines: list[str] = []
    for bundle in bundles:
        with client_of(bundle, page.threads, *options) as http:
            measurements = measure(http, num_requests, rounds, max_new_tokens)
        lines += [""] * bool(lines)
        lines += [f"### `{bundle.name}`", "", *table(columns, rows_of(measurements))]
    page.write(
        "serving",
        lines,
        f"{rounds} rounds of {num_requests} requests of {max_new_tokens} new tokens; medians with "
        "quartiles, gains pair by pair with a 95 % bootstrap interval",
    )
