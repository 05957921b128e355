"""Cost of the decoding loop itself; with --beams, its growth with the number of beams.

First measured with tables in place of engines: CPU time of the loop's thread per iteration, without
model calls. Then with real engines, for every BUNDLE: wall time per iteration by part, which
includes the cost of cold CPU caches after the target's call. Both are also measured by step of the
loop, with the number of calls. With --beams only the growth of host time with the number of beams
is measured, for every BUNDLE.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from dsbd_ort.benchmark.bench_run import PROMPTS
from dsbd_ort.decoding import (
    DecodingConfig,
    DecodingRequest,
    DecodingStats,
    StepModel,
    decode_iterations,
    result_of,
)
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.ort.ort_session import OrtSession
from lab.frame.page import RESULTS, Page, writes
from lab.host_time import budget, by_beams
from lab.host_time.bigram_models import DenseBigram, TopKBigram, random_pair
from scripts.document_sections import table

PAGE = RESULTS / "host_time.md"
PICTURE = "../../docs/images/host_time.png"  # relative to PAGE; other pages: in their folder
VOCAB_SIZE, NUM_CANDIDATES, CLOSENESS = 4096, 64, 0.85
PROMPT = range(1, 65)
TABLE_COLUMNS = ("run", "top-k head", "all logits", "target rows", "layers committed")
ENGINE_COLUMNS = ("run", "target", "draft", "host", "draft calls", "host's share")

BUDGET = "wall microseconds an iteration, in brackets calls of Python and C functions"

FIXED: dict[str, Any] = {"draft_length": 4, "top_k": 20}
RUNS: dict[str, dict[str, Any]] = {
    "dsbd W=4, 4x4": FIXED | {"strategy": "dsbd", "num_beams": 4, "width_policy": "fixed"},
    "dsbd W=2, 4x2": FIXED | {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed"},
    "speculative, 4": FIXED | {"strategy": "speculative"},
    "dsbd W=2, throughput": {
        **{"strategy": "dsbd", "num_beams": 2, "draft_policy": "throughput", "top_k": 20}
    },
    "speculative-beam-search W=4, 4x4": {
        **{"strategy": "speculative-beam-search", "num_beams": 4, "draft_length": 4}
    },
    "beam-sample W=4": {"strategy": "beam-sample", "num_beams": 4, "top_k": 20},
    "beam-search W=4": {"strategy": "beam-search", "num_beams": 4},
    "greedy": {"strategy": "greedy"},
}
# The policy "throughput" needs costs; these are like those of a 150M target and the demo draft.
COSTS = EngineCosts(CostCurve((1, 16), (8e-3, 1.6e-2)), CostCurve((1, 16), (3e-4, 5e-4)))


def decoded(
    target: StepModel,
    draft: StepModel,
    config: DecodingConfig,
    seed: int,
    clock: budget.Clock = time.thread_time,
) -> DecodingStats:
    """Return the statistics of one request; by default times are CPU seconds of this thread."""
    rng = np.random.default_rng(seed)
    return result_of(
        decode_iterations(
            DecodingRequest(prompt_ids=PROMPT, config=config, rng=rng, clock=clock, costs=COSTS),
            target,
            draft,
        )
    ).stats


def with_tables(repetitions: int, max_new_tokens: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the first table: median CPU microseconds per iteration, by head."""
    target, draft = random_pair(VOCAB_SIZE, CLOSENESS)
    with_head = TopKBigram(target, NUM_CANDIDATES), TopKBigram(draft, NUM_CANDIDATES)
    with_logits = DenseBigram(target), DenseBigram(draft)
    for name, options in RUNS.items():
        config = DecodingConfig(**options, max_new_tokens=max_new_tokens)
        cells = []
        for pair in (with_head, with_logits):
            results = repeated(lambda seed: decoded(*pair, config, seed), repetitions)  # noqa: B023
            host_us = [1e6 * stats.host_s / stats.num_iterations for stats in results]
            cells.append(f"{statistics.median(host_us):.0f} ({min(host_us):.0f})")
        rows = statistics.fmean(stats.target_rows / stats.num_iterations for stats in results)
        layers = statistics.fmean(stats.mean_acceptance_length for stats in results)
        yield name, *cells, f"{rows:.1f}", f"{layers:.2f}"


def engine_runs(pipeline: Pipeline, max_new_tokens: int) -> dict[str, budget.Request]:
    """Return for every run a function that decodes with a seed, on the engines of a pipeline."""

    def run_of(options: dict[str, Any]) -> budget.Request:
        def generated(seed: int) -> DecodingStats:
            text = PROMPTS[seed % len(PROMPTS)]
            return pipeline.generate(
                text, **options, max_new_tokens=max_new_tokens, seed=seed
            ).stats

        return generated

    return {name: run_of(options) for name, options in RUNS.items()}


def with_engines(runs: dict[str, budget.Request], repetitions: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a bundle's table: median wall microseconds per iteration, by part."""
    for name, generated in runs.items():
        all_stats = repeated(generated, repetitions)
        parts = [
            statistics.median(1e6 * getattr(s, part) / s.num_iterations for s in all_stats)
            for part in ("target_s", "draft_s", "host_s")
        ]
        calls = statistics.fmean(s.draft_calls / s.num_iterations for s in all_stats)
        share = 100 * parts[-1] / sum(parts)
        yield name, *(f"{part:.0f}" for part in parts), f"{calls:.1f}", f"{share:.1f} %"


def budget_of_tables(repetitions: int, max_new_tokens: int) -> list[str]:
    """Return the table by step, with tables in place of engines."""
    logits = random_pair(VOCAB_SIZE, CLOSENESS)
    target, draft = (TopKBigram(each, NUM_CANDIDATES) for each in logits)

    def run_of(options: dict[str, Any]) -> budget.Request:
        config = DecodingConfig(**options, max_new_tokens=max_new_tokens)
        return lambda seed: decoded(target, draft, config, seed, clock=time.perf_counter)

    runs = {name: run_of(options) for name, options in RUNS.items()}
    return budget.table_of(runs, (DenseBigram, "forward"), repetitions)


def repeated(request: Callable[[int], DecodingStats], repetitions: int) -> list[DecodingStats]:
    """Return the statistics of requests with seeds 0, 1, ...; two warm-up requests come first."""
    for seed in range(2):
        request(seed)
    return [request(seed) for seed in range(repetitions)]


def tables(
    bundles: tuple[Path, ...], repetitions: int, max_new_tokens: int, threads: int
) -> Iterator[str]:
    """Yield the lines of the first section."""
    yield (
        "Engines replaced by tables: CPU microseconds of the loop's thread an iteration, median "
        f"(least), V={VOCAB_SIZE:,}."
    )
    yield ""
    yield from table(TABLE_COLUMNS, with_tables(repetitions, max_new_tokens))
    yield from ("", f"The same by step, with the top-k head: {BUDGET}.", "")
    yield from budget_of_tables(repetitions, max_new_tokens)
    for bundle in bundles:
        yield from ("", f"`{bundle.name}`: wall microseconds an iteration, medians.", "")
        with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
            runs = engine_runs(pipeline, max_new_tokens)
            yield from table(ENGINE_COLUMNS, with_engines(runs, repetitions))
            yield from ("", f"The same by step: {BUDGET}.", "")
            yield from budget.table_of(runs, (OrtSession, "run"), repetitions)


def beam_tables(
    bundles: tuple[Path, ...], beams: list[int], repetitions: int, page: Page
) -> Iterator[str]:
    """Yield the lines of the second section; plot the first bundle's times."""
    picture = PICTURE if page.document == PAGE else Path(PICTURE).name
    columns = ("run", *(f"W={num_beams:,}" for num_beams in beams))
    for bundle in bundles:
        times = by_beams.measure(bundle, beams, repetitions, page.threads)
        yield from (
            f"`{bundle.name}`: host microseconds an iteration, medians; in brackets the multiple "
            "of 100 us an iteration + (30 us + 4 us a beam) for each layer drafted or selected.",
            "",
            *table(columns, by_beams.rows(times)),
            "",
        )
        if bundle == bundles[0]:
            by_beams.plot(times, page.document.parent / picture)
    yield f"![host time by beams]({picture})"


def beam_counts(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """Return the comma-separated numbers of beams in ``text``."""
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise click.BadParameter(f"{text!r}; expected whole numbers with commas") from None


@click.command(help=__doc__)
@click.argument("bundles", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--repetitions", default=20, show_default=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option(
    "--beams", default="", callback=beam_counts, help="Measure growth, such as 1,4,32,128,512."
)
@writes(PAGE)
def main(
    bundles: tuple[Path, ...],
    repetitions: int,
    max_new_tokens: int,
    beams: list[int],
    page: Page,
) -> None:
    """Measure and write the tables into their section of the page."""
    if beams:
        page.begin("host time by beams")
        lines = beam_tables(bundles, beams, repetitions, page)
        details = f"top-k {by_beams.TOP_K} where sampled", f"{repetitions} requests each"
        page.write("host time by beams", lines, *details)
    else:
        page.begin("host time")
        page.write("host time", tables(bundles, repetitions, max_new_tokens, page.threads))
