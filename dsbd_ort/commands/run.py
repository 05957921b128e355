"""dsbd-run: open a bundle, continue a prompt, print text and statistics."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_ort.decoding import DecodingStats
from dsbd_ort.pipeline import GenerationResult, Pipeline


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asked for.

    Attributes:
        bundle: folder of the bundle.
        prompt: text to continue.
        options: fields of DecodingConfig that were given.
        provider, num_threads, verify: see Pipeline.from_bundle.
        stream, as_json, stats: what to print and when.
    """

    bundle: Path
    prompt: str
    options: dict[str, Any]
    provider: str
    num_threads: int | None
    verify: bool
    stream: bool
    as_json: bool
    stats: bool


def run(request: RunRequest) -> None:
    """Generate and print: text (or JSON) to stdout, all else to stderr."""
    with Pipeline.from_bundle(
        request.bundle,
        provider=request.provider,
        num_threads=request.num_threads,
        verify=request.verify,
    ) as pipeline:
        if request.stream:
            result = _stream(pipeline, request)
        else:
            result = pipeline.generate(request.prompt, **request.options)
            click.echo(_as_json(result) if request.as_json else _as_text(request.prompt, result))
    if request.stats:
        print_stats(result.stats)


def _stream(pipeline: Pipeline, request: RunRequest) -> GenerationResult:
    steps = pipeline.stream(request.prompt, **request.options)
    is_first = True
    while True:
        try:
            text = next(steps).text
        except StopIteration as stop:
            click.echo()
            result: GenerationResult = stop.value
            return result
        click.echo(request.prompt + text if is_first else text, nl=False)
        is_first = False


def _as_text(prompt: str, result: GenerationResult) -> str:
    return "\n\n".join(prompt + sequence.text for sequence in result.sequences)


def _as_json(result: GenerationResult) -> str:
    return json.dumps(dataclasses.asdict(result), ensure_ascii=False)


def print_stats(stats: DecodingStats) -> None:
    """Print the statistics of one request as a table on stderr."""
    table = Table(title="statistics", show_header=False)
    for name, value in dataclasses.asdict(stats).items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)
