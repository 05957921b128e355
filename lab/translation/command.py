"""Translators in the shapes of OPUS-MT and NLLB-600M, beside CTranslate2 and transformers.

A small model of a synthetic language is trained for each shape, and put into a checkpoint of that
shape, which computes what the small one does at the cost of the large one; a draft of one decoder
layer over its encoder likewise. All tools get this checkpoint, sources of 25 tokens and one of 200,
and search greedily and with 4 beams. Everything that is made stays in the work folder: checkpoints,
bundles, the environment of CTranslate2. A report that exists is not measured again, only its table
is written: delete it to measure again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lab.frame.page import BUILD, RESULTS, Page, writes
from lab.peers.catalog import PRECISIONS
from lab.peers.comparison import Comparison
from lab.peers.prepare import NotRun, Pair, prepare
from lab.peers.report import compare
from lab.peers.rounds import Plan
from lab.translation.comparison import comparison_of, peers_of, prompts_of, section_of, warm_up_of
from lab.translation.prepared import pair_of
from lab.translation.report import tables_of
from lab.translation.shapes import SHAPES, Shape
from scripts.document_sections import write_section


def measure(
    comparison: Comparison,
    pair: Pair,
    plan: Plan,
    tools: tuple[str, ...],
    work: Path,
    file: Path,
    threads: int,
) -> None:
    """Measure a shape and write the report to ``file``."""
    report = compare(
        comparison,
        tools,
        pair,
        plan,
        work,
        params=comparison.subject,
        is_busy=False,
        checkout=None,
        threads=threads,
        report=functools.partial(print, file=sys.stderr),
    )
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    partial.rename(file)


def section_lines(shape: Shape, reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables of a shape, of reports of several numbers of threads."""
    lines: list[str] = []
    for report in sorted(reports, key=lambda report: int(report["threads"])):
        title = "1 thread" if report["threads"] == 1 else f"{report['threads']} threads"
        how = (
            f"{report['created'][:10]}, {report['machine']['processor']}, {title}, "
            f"{len(report['prompts'])} requests x {report['rounds']} rounds; medians with "
            "quartiles, ratios with a 95 % bootstrap interval over pairs."
        )
        lines += [f"### {shape.like}, {title}", "", *tables_of(report), "", how, ""]
    return lines[:-1]


@click.command(help=__doc__)
@click.option(
    "--shape",
    "names",
    type=click.Choice(list(SHAPES)),
    multiple=True,
    default=tuple(SHAPES),
    show_default=True,
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    default=PRECISIONS,
    show_default=True,
)
@click.option("--tool", "tools", multiple=True, help="Beside ours [all].")
@click.option(
    "--num-sources", type=click.IntRange(min=1), default=3, show_default=True, help="Of 25 tokens."
)
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--steps", default=300, show_default=True, help="Of a training.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    default=BUILD / "translation",
    help="Everything that is made.",
)
@click.option("--prepare", "is_preparation", is_flag=True, help="Make what is missing, and stop.")
@writes(RESULTS / "translation.md")
def main(
    names: tuple[str, ...],
    precisions: tuple[str, ...],
    tools: tuple[str, ...],
    num_sources: int,
    rounds: int,
    steps: int,
    work: Path,
    is_preparation: bool,
    page: Page,
) -> None:
    """Measure what is missing, and write the tables."""
    known = [peer.name for peer in peers_of(precisions)]
    for tool in set(tools).difference(known):
        raise click.UsageError(f"--tool is {tool!r}: expected one of {', '.join(known)}")
    work.mkdir(parents=True, exist_ok=True)
    shapes = [SHAPES[name] for name in names]
    files = {shape.name: work / f"{shape.name}-{page.threads}.json" for shape in shapes}
    if is_preparation or all(file.exists() for file in files.values()):
        page.wait = None
    page.begin(*(section_of(shape) for shape in shapes))
    for shape in shapes:
        comparison, pair = comparison_of(shape, precisions), pair_of(shape, work, steps)
        if is_preparation:
            for peer in comparison.peers:
                for run in prepare(peer, pair, work / "tools", None, page.threads):
                    if isinstance(run, NotRun):
                        click.echo(f"{peer.name}, {run.run.precision}: {run.reason}")
            continue
        if not files[shape.name].exists():
            plan = Plan(
                prompts=prompts_of(shape, num_sources),
                warm_up=warm_up_of(shape),
                max_new_tokens=comparison.max_new_tokens,
                num_rounds=rounds,
            )
            measure(comparison, pair, plan, tools, work / "tools", files[shape.name], page.threads)
        reports = [json.loads(file.read_text()) for file in work.glob(f"{shape.name}-*.json")]
        text = "\n".join(section_lines(shape, reports))
        click.echo(text)
        write_section(page.document, section_of(shape), text)
