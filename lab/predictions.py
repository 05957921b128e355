"""Gain of a predicted text in which 3, 10 or 30 % of the tokens were edited, by strategy.

BUNDLE continues Python sources without a draft. In each answer 3, 10 or 30 % of the tokens are
replaced, deleted or inserted, and the answer is generated again with the result as its prediction:
by n-grams alone, and also with the bundle's draft model if it has one. The tokens must be the same.
With --fixed, tokens per target call do not depend on the load of the machine; speeds need an idle
machine:

\b
scripts/make_twin --params 150M -o TWIN
dsbd-export --target TWIN/target --draft TWIN/draft --logits topk:64 -o BUNDLE
lab/run predictions BUNDLE
lab/run predictions BUNDLE --fixed
"""  # noqa: D301

import argparse
import heapq
import inspect
import itertools
import random
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from dsbd_ort import GenerationResult, Pipeline
from dsbd_ort.benchmark.bootstrap import spread
from lab.frame.page import BUNDLE, RESULTS, Page, ratio_cell, writes
from lab.frame.rounds import turn
from scripts.document_sections import table

SOURCES = (argparse, heapq, textwrap, inspect)
SHARES = (0.03, 0.1, 0.3)
COLUMNS = ("strategy", "drafter", "edits", "tokens per target call", "times as fast")
STRATEGIES: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # options (without a draft, with a draft)
    "greedy": ({"strategy": "greedy"}, {"strategy": "speculative-beam-search", "num_beams": 1}),
    "sample": ({"strategy": "sample", "top_k": 20}, {"strategy": "speculative", "top_k": 20}),
    "search, W=4": (
        {"strategy": "beam-search", "num_beams": 4},
        {"strategy": "speculative-beam-search", "num_beams": 4},
    ),
}

FIXED = {  # shapes of drafts that do not depend on the costs of calls
    "greedy": {"draft_length": 16, "draft_beams": 3},
    "sample": {"draft_length": 16},
    "search, W=4": {"draft_length": 8, "draft_beams": 8},
}


def edited(token_ids: Sequence[int], share: float, seed: int) -> list[int]:
    """Return tokens of which about ``share`` is replaced, deleted or preceded by another token."""
    rng, edited_ids = random.Random(seed), list[int]()
    for token in token_ids:
        kind = rng.choice(("replaced", "deleted", "inserted")) if rng.random() < share else "kept"
        if kind in ("replaced", "inserted"):
            edited_ids.append(rng.choice(token_ids))
        if kind in ("kept", "inserted"):
            edited_ids.append(token)
    return edited_ids


def timed(pipeline: Pipeline, prompt: str, **options: Any) -> tuple[float, GenerationResult]:
    """Return the duration of a request in seconds, and its result."""
    began = time.perf_counter()
    result = pipeline.generate(prompt, eos_token_id=(), **options)
    return time.perf_counter() - began, result


def rows_of(
    pipeline: Pipeline, strategy: str, prompts: Sequence[str], length: int, shape: dict[str, Any]
) -> list[tuple[str, ...]]:
    """Return the rows of a strategy; ``shape``: options of its drafts."""
    plain, drafted = STRATEGIES[strategy]
    drafted = {**drafted, **shape, "max_new_tokens": length}
    drafters = ["ngram", *(["model", "model+ngram"] if pipeline.has_draft else [])]
    cells = [
        cell
        for cell in itertools.product(drafters, (None, *SHARES))
        if (cell[0] == "model") <= (cell[1] is None)  # a draft model alone reads no prediction
    ]
    speeds: dict[Any, list[float]] = {cell: [] for cell in cells}
    calls, num_tokens = dict.fromkeys(cells, 0), 0
    for number, prompt in enumerate(track(prompts, strategy, console=Console(stderr=True))):
        usual, answer = timed(pipeline, prompt, seed=number, **plain, max_new_tokens=length)
        ids = answer.sequences[0].token_ids
        num_tokens += len(ids)
        for cell in turn(cells, number):
            drafter, share = cell
            predicted = () if share is None else edited(ids, share, number)
            options = {**drafted, "drafter": drafter, "predicted_token_ids": predicted}
            seconds, result = timed(pipeline, prompt, seed=number, **options)
            if result.sequences[0].token_ids != ids:
                raise click.ClickException(f"{strategy}, {cell}: the tokens are others")
            speeds[cell].append(usual / seconds)
            calls[cell] += result.stats.target_calls
    return [
        (
            strategy,
            drafter,
            "no prediction" if share is None else f"{share:.0%}",
            f"{num_tokens / calls[drafter, share]:.2f}",
            ratio_cell(spread(speeds[drafter, share])),
        )
        for drafter, share in cells
    ]


@click.command(help=inspect.getdoc(inspect.getmodule(rows_of)))
@BUNDLE
@click.option("--prompts", default=8, show_default=True, help="Answers for each cell.")
@click.option("--max-new-tokens", default=400, show_default=True, help="For each answer.")
@click.option("--fixed", is_flag=True, help="Drafts of a fixed shape; no speeds.")
@writes(RESULTS / "drafts.md")
def main(page: Page, bundle: Path, prompts: int, max_new_tokens: int, *, fixed: bool) -> None:
    """Measure a bundle and write the table into the section "predictions" of the page."""
    page.begin("predictions")
    texts = [inspect.getsource(SOURCES[n % len(SOURCES)])[n * 900 :][:600] for n in range(prompts)]
    with Pipeline.from_bundle(bundle, num_threads=page.threads, ngram_pool=0) as pipeline:
        for options in itertools.chain(*STRATEGIES.values()):  # learns the costs of calls
            pipeline.generate(texts[0], **options, max_new_tokens=64)
        rows = [
            row[:-1] if fixed else row
            for name in STRATEGIES
            for row in rows_of(pipeline, name, texts, max_new_tokens, FIXED[name] if fixed else {})
        ]
    columns = COLUMNS[:-1] if fixed else COLUMNS
    page.write("predictions", table(columns, rows), f"{prompts} answers, {bundle.name}")


if __name__ == "__main__":
    main()
