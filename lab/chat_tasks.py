"""Chat tasks with exact answers, by strategy: dates, sums, extraction, classification.

Runs the 60 tasks of lab/chat_tasks.jsonl, 15 of each kind, on each of BUNDLES, which need a chat
template. A text is exact if it is one of the task's answers; case, spaces and a full stop do not
matter. It has the answer if an answer is among its words; small models achieve this far more often.
Intervals are 95 % bootstrap intervals over tasks. Sampling strategies run each task with --seeds
seeds.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from dsbd_ort import Pipeline
from dsbd_ort.benchmark.bootstrap import bootstrap
from lab.frame.page import BUNDLES, RESULTS, Page, writes
from scripts.document_sections import table

TASKS = Path(__file__).with_suffix(".jsonl")
KINDS = ("dates", "sums", "extraction", "classification")
SECTION = "chat tasks"
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "sample": {"strategy": "sample", **SAMPLED},
    "dsbd, W=4": {"strategy": "dsbd", "num_beams": 4, **SAMPLED},
    "beam search, W=4": {"strategy": "beam-search", "num_beams": 4},
}
_NEW_TOKENS = 48


@dataclass(frozen=True)
class Task:
    """One task: a question and its right answers."""

    kind: str
    prompt: str
    answers: tuple[str, ...]

    def is_exact(self, text: str) -> bool:
        """Return whether a text is one of the answers."""
        return _plain(text) in {_plain(answer) for answer in self.answers}

    def is_in(self, text: str) -> bool:
        """Return whether one of the answers is among the words of a text."""
        return any(
            re.search(rf"(?<![\w.-]){re.escape(_plain(answer))}(?!\w|\.\d)", _plain(text))
            for answer in self.answers
        )


def _plain(text: str) -> str:
    return " ".join(text.strip().rstrip(".").casefold().split())


def tasks(file: Path = TASKS) -> list[Task]:
    """Return the tasks; kinds take turns, so that the first few tasks have all kinds."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    all_tasks = [Task(each["kind"], each["prompt"], tuple(each["answers"])) for each in lines]
    by_kind = [[task for task in all_tasks if task.kind == kind] for kind in KINDS]
    return [task for same_place in zip(*by_kind, strict=True) for task in same_place]


def quality_table(
    bundle: Path, chosen: Sequence[Task], threads: int, num_seeds: int = 1
) -> list[str]:
    """Return the table of a bundle; ``dsbd`` is not run without a draft."""
    rows = []
    with Pipeline.from_bundle(bundle, num_threads=threads) as pipeline:
        has_draft = "draft" in pipeline.bundle.roles
        for name, options in STRATEGIES.items():
            if options["strategy"] == "dsbd" and not has_draft:
                rows.append((name, "not run: the bundle has no draft", *[""] * (len(KINDS) + 2)))
                continue
            seeds = range(num_seeds if "temperature" in options else 1)
            rows.append((name, *_cells(pipeline, chosen, options, seeds)))
    columns = ("strategy", "exact", "has the answer", *KINDS, "tokens an answer")
    return table(columns, rows)


def _cells(
    pipeline: Pipeline, chosen: Sequence[Task], options: dict[str, Any], seeds: range
) -> tuple[str, ...]:
    """Return the cells of a strategy."""
    exact: list[float] = []
    has_answer: list[float] = []
    lengths: list[float] = []
    for task in track(chosen, options["strategy"], console=Console(stderr=True)):
        prompt = pipeline.chat_prompt([{"role": "user", "content": task.prompt}])
        answers = [
            pipeline.generate(prompt, max_new_tokens=_NEW_TOKENS, seed=seed, **options).sequences[0]
            for seed in seeds
        ]
        exact.append(sum(task.is_exact(answer.text) for answer in answers) / len(seeds))
        has_answer.append(sum(task.is_in(answer.text) for answer in answers) / len(seeds))
        lengths.append(sum(len(answer.token_ids) for answer in answers) / len(seeds))
    of_kinds = [
        [share for task, share in zip(chosen, has_answer, strict=True) if task.kind == kind]
        for kind in KINDS
    ]
    shares = (f"{sum(each):.1f} of {len(each)}" for each in of_kinds)
    mean_length = sum(lengths) / len(lengths)
    return _interval(exact), _interval(has_answer), *shares, f"{mean_length:.1f}"


def _interval(shares: Sequence[float]) -> str:
    estimate = bootstrap(shares, "mean")
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


@click.command(help=__doc__)
@BUNDLES
@click.option("--num-tasks", type=click.IntRange(1, 60), default=60, show_default=True)
@click.option("--seeds", "num_seeds", type=click.IntRange(min=1), default=3, show_default=True)
@writes(RESULTS / "chat_tasks.md", is_timed=False)
def main(bundles: tuple[Path, ...], num_tasks: int, num_seeds: int, page: Page) -> None:
    """Ask the tasks and write the tables."""
    page.begin(SECTION)
    lines: list[str] = []
    for bundle in bundles:
        quality = quality_table(bundle, tasks()[:num_tasks], page.threads, num_seeds)
        lines += [""] * bool(lines) + [f"`{bundle.name}`:", "", *quality]
    page.write(SECTION, lines, f"{num_tasks} tasks, {num_seeds} seeds where tokens are drawn")
