"""How even streams are: the largest chunk of an answer, by strategy.

Every strategy streams the same prompts from a dsbd-serve on BUNDLE. The share of a chunk is its
characters over those of the answer: 100 % means that nothing came before the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx2
import numpy as np
from rich.progress import track

from dsbd_ort.benchmark.prompts import PROMPTS
from lab.frame.page import BUNDLE, RESULTS, Page, writes
from lab.frame.server_process import MODEL, client_of
from scripts.document_sections import table

RUNS: dict[str, dict[str, Any]] = {
    "`sample`": {"strategy": "sample"},
    "`speculative`": {"strategy": "speculative"},
    "`tree-speculative`": {"strategy": "tree-speculative"},
    "`dsbd` W=2": {"strategy": "dsbd", "num_beams": 2},
    "`dsbd` W=4": {"strategy": "dsbd", "num_beams": 4},
    "`dsbd` W=4, threshold": {"strategy": "dsbd", "num_beams": 4, "width_policy": "threshold"},
    "`beam-sample` W=4": {"strategy": "beam-sample", "num_beams": 4},
    "`speculative-beam-search` W=1": {"strategy": "speculative-beam-search", "num_beams": 1},
    "`speculative-beam-search` W=4": {"strategy": "speculative-beam-search", "num_beams": 4},
    "`mjsd`": {"strategy": "mjsd"},
}


def chunks(http: httpx2.Client, body: dict[str, Any]) -> Iterator[str]:
    """Yield the text of every chunk that has one."""
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise click.ClickException(event["error"]["message"])
                yield from (choice["text"] for choice in event["choices"] if choice["text"])


def shares(http: httpx2.Client, options: dict[str, Any], num_tokens: int) -> list[float]:
    """Return of every prompt the share of its largest chunk."""
    found = []
    for index, prompt in enumerate(PROMPTS):
        body = {
            "model": MODEL,
            "prompt": prompt,
            "seed": index,
            "max_tokens": num_tokens,
            "ignore_eos": True,  # all have the same number of tokens
            "stream": True,
            **options,
        }
        if "search" not in options["strategy"]:
            body["top_k"] = 20
        sizes = [len(text) for text in chunks(http, body)]
        found.append(max(sizes) / sum(sizes))
    return found


@click.command(help=__doc__)
@BUNDLE
@click.option("--max-new-tokens", default=256, show_default=True)
@writes(RESULTS / "serving.md", is_timed=False)
def main(bundle: Path, max_new_tokens: int, page: Page) -> None:
    """Measure, print the table and write it between the marks of the document."""
    page.begin("streams")
    rows = []
    with client_of(bundle, page.threads) as http:
        for name, run in track(RUNS.items(), description="strategies", transient=True):
            found = shares(http, run, max_new_tokens)
            rows.append((name, f"{np.median(found):.1%}", f"{max(found):.1%}"))
    columns = ("strategy", "largest chunk, median", "worst")
    where = f"`{bundle.name}`, {len(PROMPTS)} prompts, {max_new_tokens} new tokens, one at a time"
    page.write("streams", table(columns, rows), where)
