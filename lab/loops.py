"""The loop in C++ compared with the loop in numpy: host time, and many requests at a time.

Host time is all time outside engine calls. With --bundle both loops get the same requests in turn,
in one process with the same Python engines, and must return the same tokens. Many requests run on a
simulated device: its engines are tables with a large vocabulary and a top-k head, and a call takes
2 ms (target) or 0.5 ms (draft) for up to 64 rows, as on a GPU. The limit in the table is the speed
if these calls alone took time.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import spread
from dsbd_ort.decoding import DecodingConfig, DecodingRequest, DecodingStats
from dsbd_ort.decoding.decoder import Decoder
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.native_decoder import Loop, new_decoder
from dsbd_ort.decoding.whole_requests import decoded_together
from lab.frame.page import RESULTS, Page, ratio_cell, writes
from lab.frame.rounds import turn
from lab.host_time.bigram_models import TopKBigram, random_pair
from scripts.document_sections import table

LOOPS: tuple[Loop, ...] = ("python", "native")
PROMPT = list(range(3, 67))
HOST_RUNS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample", "top_k": 20},
    "beam-sample, W=4": {"strategy": "beam-sample", "num_beams": 4, "top_k": 20},
    "dsbd, W=2, drafts 4x6": {
        **{"strategy": "dsbd", "num_beams": 2, "draft_policy": "fixed", "top_k": 20},
        **{"draft_length": 4, "draft_beams": 6},
    },
    "dsbd, W=2": {"strategy": "dsbd", "num_beams": 2, "top_k": 20},
}
HOST_COLUMNS = "run", "numpy, us an iteration", "C++, us an iteration", "C++ / numpy"

TARGET_S, DRAFT_S, ROWS_OF_CALL = 2e-3, 5e-4, 64
AT_A_TIME = 1, 8, 32, 64
MANY_RUNS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample"},
    "dsbd, W=2": {"strategy": "dsbd", "num_beams": 2, "draft_policy": "throughput"},
    "dsbd, W=4": {"strategy": "dsbd", "num_beams": 4, "draft_policy": "throughput"},
}
MANY_COLUMNS = (
    *("run", "at a time", "limit, tokens/s"),
    *("numpy, tokens/s", "numpy / limit", "C++, tokens/s", "C++ / limit"),
)


class SimulatedEngine(TopKBigram):
    """A table whose calls take as long as those of a device; ``seconds``: total of all calls."""

    def __init__(self, logits: Any, call_s: float) -> None:
        super().__init__(logits, 64)
        self.seconds = 0.0
        self._call_s = call_s

    def forward(self, forward: Forward) -> ForwardResult:
        began = time.perf_counter()
        seconds = self._call_s * -(-forward.num_new // ROWS_OF_CALL)
        result = super().forward(forward)
        while time.perf_counter() < began + seconds:
            pass
        self.seconds += time.perf_counter() - began
        return result


def host_rows(bundle: Path, threads: int, repetitions: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a bundle's table."""
    pipelines = {
        loop: Pipeline.from_bundle(bundle, num_threads=threads, loop=loop) for loop in LOOPS
    }
    for name, options in HOST_RUNS.items():
        host_us: dict[Loop, list[float]] = {loop: [] for loop in LOOPS}
        for number in range(-2, repetitions):
            tokens = []
            for loop in turn(LOOPS, number):
                result = pipelines[loop].generate(
                    PROMPT, **options, max_new_tokens=64, seed=number + 2, eos_token_id=[]
                )
                tokens.append(result.sequences[0].token_ids)
                if number >= 0:
                    host_us[loop].append(1e6 * _host_s(result.stats))
            assert tokens[0] == tokens[1], f"{name}: the loops differ"
        ratios = [
            mine / its for its, mine in zip(host_us["python"], host_us["native"], strict=True)
        ]
        cells = (f"{statistics.median(host_us[loop]):.0f}" for loop in LOOPS)
        yield name, *cells, ratio_cell(spread(ratios))
    for pipeline in pipelines.values():
        pipeline.close()


def _host_s(stats: DecodingStats) -> float:
    return stats.host_s / stats.num_iterations


def many_rows(num_new: int, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of the simulated device."""
    logits = random_pair(4096, 0.85)
    for (name, options), number in itertools.product(MANY_RUNS.items(), AT_A_TIME):
        config = DecodingConfig(**options, top_k=20, max_new_tokens=num_new)
        speeds: dict[Loop, list[float]] = {loop: [] for loop in LOOPS}
        shares: dict[Loop, list[float]] = {loop: [] for loop in LOOPS}
        for turn_number in range(rounds):
            for loop in turn(LOOPS, turn_number):
                engines = (
                    SimulatedEngine(logits[0], TARGET_S),
                    SimulatedEngine(logits[1], DRAFT_S),
                )
                decoder = new_decoder(*engines, loop, costs=COSTS)
                seconds = _decoded(decoder, config, number)
                speeds[loop].append(number * num_new / seconds)
                shares[loop].append(sum(each.seconds for each in engines) / seconds)
        limit = statistics.median(speeds["native"]) / statistics.median(shares["native"])
        cells: list[str] = []
        for loop in LOOPS:
            cells += [f"{statistics.median(speeds[loop]):.0f}", ratio_cell(spread(shares[loop]))]
        yield name, str(number), f"{limit:.0f}", *cells


COSTS = EngineCosts(CostCurve((1, 64), (2e-3, 2e-3)), CostCurve((1, 64), (5e-4, 5e-4)))


def _decoded(decoder: Decoder, config: DecodingConfig, number: int) -> float:
    """Return the seconds that ``number`` requests take, all decoded together."""
    estimator = AcceptanceEstimator()
    requests = [
        DecodingRequest(
            prompt_ids=[seed + 1, *PROMPT[1:]],
            config=config,
            rng=np.random.default_rng(seed),
            costs=COSTS,
            estimator=estimator,
        )
        for seed in range(number)
    ]
    began = time.perf_counter()
    decoded_together(decoder, requests, number)
    return time.perf_counter() - began


@click.command(help=__doc__)
@click.option("--bundle", "bundles", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--repetitions", default=20, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-new-tokens", "num_new", default=64, show_default=True)
@click.option("--many/--no-many", "is_many", default=True, help="Measure the simulated device.")
@writes(RESULTS / "loops.md")
def main(
    bundles: tuple[Path, ...],
    repetitions: int,
    rounds: int,
    num_new: int,
    is_many: bool,
    page: Page,
) -> None:
    """Measure, and write the sections of the page."""
    sections: dict[str, Callable[[], list[str]]] = {}
    if bundles:
        sections["host"] = lambda: [
            line
            for bundle in bundles
            for line in (
                f"`{bundle.name}`, {repetitions} requests of 64 tokens:",
                "",
                *table(HOST_COLUMNS, host_rows(bundle, page.threads, repetitions)),
                "",
            )
        ]
    if is_many:
        sections["many at a time"] = lambda: table(MANY_COLUMNS, many_rows(num_new, rounds))
    page.begin(*sections)
    for name, lines in sections.items():
        page.write(name, lines())
