"""What each drafter is worth, on work that copies and on free text.

Copying: texts that begin to repeat what they hold, of copying_prompts. Every drafter decodes the
same requests in turn; the ratio is that to no draft at all, pair by pair. Each of the BUNDLES has a
table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import track

from dsbd_ort.benchmark.bench_run import NO_BASELINE, BenchRun
from dsbd_ort.benchmark.machine import EnergyMeter
from dsbd_ort.benchmark.measure import measure, warm_up
from dsbd_ort.benchmark.prompts import PROMPTS
from dsbd_ort.benchmark.report import RunSummary, summarize
from dsbd_ort.pipeline import Pipeline
from lab.frame.copying_prompts import copying_prompts
from lab.frame.page import BUNDLES, RESULTS, Page, ratio_cell, writes
from scripts.document_sections import table

NOTHING = "no draft"
DRAFTERS = ("none", "ngram", "model", "model+ngram")
SHAPES: dict[str, dict[str, Any]] = {
    "one beam, sampled": {"strategy": "speculative"},
    "W=2, sampled": {"strategy": "dsbd", "num_beams": 2},
    "W=4, sampled": {"strategy": "dsbd", "num_beams": 4},
    "W=4, beam search": {"strategy": "speculative-beam-search", "num_beams": 4},
}
COLUMNS = (
    "work",
    "beams",
    "drafter",
    "tokens/iteration",
    "times as fast as no draft",
    "same tokens",
)


def summaries(
    pipeline: Pipeline, prompts: list[str], options: dict[str, Any], repetitions: int
) -> dict[str, RunSummary]:
    """Return a summary for each drafter, compared with none."""
    runs = []
    for drafter in DRAFTERS:
        baseline = NO_BASELINE if drafter == "none" else NOTHING
        name = NOTHING if drafter == "none" else drafter
        given = {**options, "drafter": drafter}
        runs.append(BenchRun(options=given, given_name=name, baseline=baseline))
    for _ in warm_up(pipeline, runs, prompts):
        pass
    found = measure(
        pipeline,
        runs,
        prompts,
        repetitions=repetitions,
        seed=0,
        clock=time.perf_counter,
        energy=EnergyMeter([]),
    )
    return {summary.name: summary for summary in summarize(runs, list(found))}


def rows(
    bundle: Path, repetitions: int, num_tokens: int, threads: int
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    work = {"copying": copying_prompts(), "free text": list(PROMPTS)}
    cases = [(kind, shape) for kind in work for shape in SHAPES]
    with Pipeline.from_bundle(
        bundle, num_threads=threads, prefix_cache=False, ngram_pool=0
    ) as pipeline:
        for kind, shape in track(cases, description="drafters", transient=True):
            options = {**SHAPES[shape], "max_new_tokens": num_tokens}
            if "search" not in options["strategy"]:
                options |= {"top_k": 20, "temperature": 0.7}
            for name, found in summaries(pipeline, work[kind], options, repetitions).items():
                compared = found.comparison
                ratio = "1" if compared is None else ratio_cell(compared.speedup)
                same = "" if compared is None else f"{compared.num_identical}/{compared.num_pairs}"
                yield kind, shape, name, f"{found.mean_acceptance_length:.2f}", ratio, same


@click.command(help=__doc__)
@BUNDLES
@click.option("--repetitions", default=3, show_default=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@writes(RESULTS / "drafters.md")
def main(bundles: tuple[Path, ...], repetitions: int, max_new_tokens: int, page: Page) -> None:
    """Measure and write."""
    page.begin("drafters")
    lines: list[str] = []
    for bundle in bundles:
        lines += [""] * bool(lines) + [
            f"`{bundle.name}`, {max_new_tokens} tokens; draft policy `throughput`, no pool.",
            "",
            *table(COLUMNS, rows(bundle, repetitions, max_new_tokens, page.threads)),
        ]
    details = f"medians of the ratios of {repetitions} rounds, 95 % intervals"
    page.write("drafters", lines, details)
