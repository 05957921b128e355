"""Cost of a token after long prompts, and memory while the caches grow.

BUNDLES are exported from a twin with a long context, one or several of the same twin:

\b
scripts/make_twin --params 150M --context 4096 -o TWIN
dsbd-export --target TWIN/target --draft TWIN/draft --logits topk:64 -o BUNDLE
dsbd-export --target TWIN/target --draft TWIN/draft --logits topk:64 --attention grouped -o BUNDLE2

Every prompt length has its own pipeline, which keeps its prompt's rows; they are measured in turn,
forwards and backwards. The second table has the memory of the caches while they grow.

lab/run calls times single engine calls.
"""  # noqa: D301

import argparse
import inspect
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.progress import track

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import spread
from dsbd_ort.benchmark.report import precision_name
from dsbd_ort.decoding import DecodingStats
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.attention.kv_cache import bucket_capacity
from lab.frame.page import BUNDLES, RESULTS, Page, spread_cell, writes
from lab.frame.rounds import turn
from scripts.document_sections import table

TIME_COLUMNS = ("run", "prompt", "ms/token", "ratio", "ms/iteration", "ratio", "tokens/iteration")
GROWTH_COLUMNS = ("rows", "caches, MB", "peak while growing, MB", "peak / grown", "ms")
LENGTHS = (256, 1024, 2048)  # and the whole context minus the new tokens
FIXED: dict[str, Any] = {"strategy": "dsbd", "width_policy": "fixed"}
RUNS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample"},
    "beam-sample W=2": {"strategy": "beam-sample", "num_beams": 2},
    "beam-sample W=4": {"strategy": "beam-sample", "num_beams": 4},
    "dsbd W=2, 4x2": {**FIXED, "num_beams": 2, "draft_length": 4, "draft_beams": 2},
    "dsbd W=4, 2x6": {**FIXED, "num_beams": 4, "draft_length": 2, "draft_beams": 6},
}


@dataclass
class Found:
    """For each repetition: milliseconds per token, per iteration, and layers per iteration."""

    token_ms: list[float] = field(default_factory=list)
    iteration_ms: list[float] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)

    def add(self, stats: DecodingStats) -> None:
        """Add one request, without its first iteration, which computes the prompt."""
        assert stats.time_per_output_token_s is not None
        seconds = stats.time_per_output_token_s * (stats.num_output_tokens - 1)
        self.token_ms.append(1e3 * stats.time_per_output_token_s)
        self.iteration_ms.append(1e3 * seconds / (stats.num_iterations - 1))
        self.layers.append(stats.mean_acceptance_length)


def prompts(bundle: Bundle, pipeline: Pipeline, max_new_tokens: int) -> list[list[int]]:
    """Return a prompt of each length; all end in the same tokens of Python source."""
    context = min(bundle.entry(role).context_length for role in ("target", "draft"))
    lengths = [*LENGTHS, context - max_new_tokens]
    if lengths != sorted(set(lengths)):
        raise click.UsageError(
            f"{bundle.path} has a context of {context}; make a twin with --context 4096"
        )
    tokens = pipeline.tokenizer.encode(inspect.getsource(argparse))
    return [tokens[lengths[-1] - length : lengths[-1]] for length in lengths]


def measure(
    bundle: Bundle, *, threads: int, repetitions: int, max_new_tokens: int
) -> dict[tuple[str, int], Found]:
    """Return the measurements by run and prompt length."""
    measurements: dict[tuple[str, int], Found] = defaultdict(Found)
    with ExitStack() as stack:
        first = stack.enter_context(Pipeline.from_bundle(bundle.path, num_threads=threads))
        all_prompts = prompts(bundle, first, max_new_tokens)
        pipelines = [first] + [
            stack.enter_context(Pipeline.from_bundle(bundle.path, num_threads=threads))
            for _ in all_prompts[1:]
        ]
        pairs = list(zip(pipelines, all_prompts, strict=True))
        options: dict[str, Any] = {
            "top_k": 20,
            "max_new_tokens": max_new_tokens,
            "eos_token_id": (),
        }
        for pipeline, prompt in track(pairs, description="prompts", transient=True):
            for of_run in RUNS.values():  # computes the prompt's rows, which are kept
                pipeline.generate(prompt, **{**options, **of_run, "max_new_tokens": 4})
        for seed in track(range(repetitions), description="repetitions", transient=True):
            for name, of_run in RUNS.items():
                for pipeline, prompt in turn(pairs, seed):
                    result = pipeline.generate(prompt, seed=seed, **options, **of_run)
                    measurements[name, len(prompt)].add(result.stats)
    return measurements


def time_rows(measurements: dict[tuple[str, int], Found]) -> Iterator[tuple[str, ...]]:
    """Yield a row per run and length; ratios are medians over pairs of the same repetition."""
    for (name, length), here in measurements.items():
        base = measurements[name, LENGTHS[0]]
        cells = []
        for mine, theirs in (
            (here.token_ms, base.token_ms),
            (here.iteration_ms, base.iteration_ms),
        ):
            cells.append(spread_cell(spread(mine)))
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            cells.append(f"**{statistics.median(ratios):.2f}**")
        yield name, str(length), *cells, f"{statistics.fmean(here.layers):.2f}"


def growth_rows(bundle: Bundle, threads: int, limit: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each step in which the target's caches grow, up to ``limit`` rows."""
    capacities = sorted({bucket_capacity(rows) for rows in range(1, limit + 1)})
    session = OrtSession(
        bundle.model_path("target"),
        bundle.entry("target"),
        settings=EngineSettings(num_threads=threads),
    )
    for old, new in pairwise(capacities):
        session.rows.reserve(0, 0)
        tracemalloc.start()
        session.rows.reserve(old, 0)  # new buffers, which tracemalloc sees
        tracemalloc.reset_peak()
        began = time.perf_counter()
        session.rows.reserve(new, old)
        seconds = time.perf_counter() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        megabytes = session.rows.num_bytes / 1e6
        yield (
            f"{old} -> {new}",
            f"{megabytes * old / new:.1f} -> {megabytes:.1f}",
            f"{peak / 1e6:.1f}",
            f"{peak / session.rows.num_bytes:.2f}",
            f"{1e3 * seconds:.0f}",
        )
    session.close()


@click.command(help=__doc__)
@BUNDLES
@click.option("--repetitions", default=4, show_default=True)
@click.option("--max-new-tokens", default=24, show_default=True)
@writes(RESULTS / "long_context.md")
def main(bundles: tuple[Path, ...], repetitions: int, max_new_tokens: int, page: Page) -> None:
    """Measure every bundle and write the tables."""
    page.begin("long context")
    lines = []
    for path in bundles:
        bundle = open_bundle(path)
        measurements = measure(
            bundle, threads=page.threads, repetitions=repetitions, max_new_tokens=max_new_tokens
        )
        precision = precision_name(bundle.entry("target"))
        lines += [f"### {precision} (`{path.name}`)", ""]
        lines += [*table(TIME_COLUMNS, time_rows(measurements)), ""]
    lines += ["### Memory while the target's caches grow", ""]
    limit = bundle.entry("target").context_length
    lines += table(GROWTH_COLUMNS, growth_rows(bundle, page.threads, limit))
    page.write(
        "long context",
        lines,
        f"{repetitions} repetitions of {max_new_tokens} new tokens; medians with quartiles, "
        f"ratios to the prompt of {LENGTHS[0]} tokens pair by pair. The prompt's own rows are "
        "not counted",
    )
