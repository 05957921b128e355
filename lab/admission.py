"""Chats without max_tokens that run together in a cache of so many rows.

Answers may be as long as the context of BUNDLE. They end by themselves, or where --stop is found.
Each of --rows is a service whose caches hold so many rows. Prompts are computed anew every time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dsbd_ort.benchmark.prompts import PROMPTS
from dsbd_ort.decoding.row_bounds import most_rows
from dsbd_ort.engine import Service, ServiceLimits, ServiceStats
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.results import GenerationResult
from dsbd_runtime.parts.cache_entries import every_row
from dsbd_runtime.parts.kv_cache import row_bytes
from lab.frame.page import BUNDLE, RESULTS, Page, writes
from scripts.document_sections import table

COLUMNS = (
    "rows of the cache",
    "fit by worst case",
    "most running",
    "rows reserved, most",
    "rows in use, most",
    "preemptions",
    "same tokens as alone",
    "first answer, s",
    "last answer, s",
)


@dataclass
class Found:
    """What was seen of one service.

    Attributes:
        seconds: of every answer, from the start of all.
        stats: after every piece.
    """

    results: list[GenerationResult] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: list[ServiceStats] = field(default_factory=list)


def run_together(pipeline: Pipeline, chats: Sequence[dict[str, Any]], rows: int) -> Found:
    """Run all chats at a time in a cache of so many rows."""
    of_row = sum(
        row_bytes(every_row(entry.caches)) for entry in pipeline.bundle.entry_by_role.values()
    )
    limits = ServiceLimits(max_requests=len(chats), kv_bytes=rows * of_row)
    found = Found()
    began = time.perf_counter()

    def answer(service: Service, chat: dict[str, Any]) -> GenerationResult:
        stream = service.stream(**chat)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                found.seconds.append(time.perf_counter() - began)
                result: GenerationResult = end.value
                return result
            found.stats.append(service.stats())

    with Service(pipeline, limits) as service, ThreadPoolExecutor(len(chats)) as threads:
        found.results = list(threads.map(lambda chat: answer(service, chat), chats))
    return found


def row_of(found: Found, chats: Sequence[dict[str, Any]], alone: list[list[int]]) -> list[str]:
    """Return the cells of a service."""
    last = found.stats[-1]
    bounds = [chat["num_rows"] for chat in chats]
    num_fitting = sum(sum(bounds[: i + 1]) <= last.max_rows for i in range(len(bounds)))
    tokens = [result.sequences[0].token_ids for result in found.results]
    num_same = sum(a == b for a, b in zip(tokens, alone, strict=True))
    return [
        f"{last.max_rows:,}",
        str(num_fitting),
        str(max(stats.num_running for stats in found.stats)),
        f"{max(stats.rows_reserved for stats in found.stats):,}",
        f"{max(stats.rows_in_use for stats in found.stats):,}",
        str(max(stats.num_preemptions for stats in found.stats)),
        f"{num_same}/{len(tokens)}",
        f"{min(found.seconds):.0f}",
        f"{max(found.seconds):.0f}",
    ]


@click.command(help=__doc__)
@BUNDLE
@click.option("--chats", "num_chats", default=8, show_default=True)
@click.option("--rows", multiple=True, type=int, default=(65536,), show_default=True)
@click.option("--limit", type=int, multiple=True, help="Longest answer, one for each --rows.")
@click.option("--stop", default="\n\n", help="Text that ends an answer [a blank line].")
@writes(RESULTS / "serving.md")
def main(
    bundle: Path,
    num_chats: int,
    rows: tuple[int, ...],
    limit: tuple[int, ...],
    stop: str,
    page: Page,
) -> None:
    """Measure, print the table and write it between the marks of the document."""
    page.begin("admission")
    cells = []
    with Pipeline.from_bundle(bundle, num_threads=page.threads, prefix_cache=False) as pipeline:
        context = pipeline.bundle.context_length
        for index, num_rows in enumerate(rows):
            longest = limit[index] if limit else context
            chats = [chat_of(pipeline, index, longest, stop) for index in range(num_chats)]
            asked = [{n: v for n, v in chat.items() if n != "num_rows"} for chat in chats]
            alone = [pipeline.generate(**chat).sequences[0].token_ids for chat in asked]
            lengths = sorted(map(len, alone))
            click.echo(f"tokens of the answers: {lengths}")
            found = run_together(pipeline, asked, num_rows)
            cells.append([f"{longest:,}", f"{lengths[0]} to {lengths[-1]}"])
            cells[-1] += row_of(found, chats, alone)
    head = ("answers of at most", "tokens of the answers", *COLUMNS)
    detail = f"`{bundle.name}`, a context of {context:,}, {num_chats} chats at a time"
    page.write("admission", table(head, cells), detail)


def chat_of(pipeline: Pipeline, index: int, longest: int, stop: str) -> dict[str, Any]:
    """Return the arguments of a request, and the rows that it may need."""
    options: dict[str, Any] = {"strategy": "speculative", "top_k": 20, "seed": index}
    prompt = PROMPTS[index % len(PROMPTS)]
    options |= {"stop_strings": stop, "draft_length": 4}
    num_prompt = len(pipeline.tokenizer.encode(prompt))
    options["max_new_tokens"] = min(longest, pipeline.bundle.context_length - num_prompt)
    num_rows = most_rows(num_prompt, pipeline.config(options))
    return {"prompt": prompt, "num_rows": num_rows, **options}
