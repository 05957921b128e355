"""Comparison with other tools: same checkpoints, prompts, lengths and threads, in one run.

--compare strategies: free text. schemas: documents under JSON schemas. retrieval: wide beams that
search item ids, under a trie if the tool has one; the command fails if two searches that must
return the same results do not.

Every tool has its own environment and converts the checkpoints once, in its own way; a new twin is
converted again. Every row is measured in separate processes, one per round. If a tool cannot be
installed or run, or its conversion fails, the table has the reason. If the report exists, nothing
is measured and only the tables are written: delete it to measure again.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import click
from tokenizers import Tokenizer

from dsbd_ort.benchmark.bench_run import PROMPTS
from lab.frame.page import BUILD, RESULTS, Page, writes
from lab.frame.twins import bundle_of, twin_of
from lab.peers.catalog import QUANTIZE_BY_PRECISION
from lab.peers.comparison import (
    COMPARISONS,
    RETRIEVAL,
    STRATEGIES,
    Comparison,
    next_to_busy,
    retrieval,
)
from lab.peers.documents import Documents
from lab.peers.ids import Ids
from lab.peers.prepare import Pair
from lab.peers.report import compare, tables_of
from lab.peers.rounds import Plan
from lab.peers.runners.serve import end_token_of
from lab.peers.searches import broken_checks
from scripts.document_sections import write_section

FOLDER = click.Path(path_type=Path, file_okay=False)


def pair_of(params: str, speed: Path, logits: str) -> Pair:
    """Return the checkpoints of the twin and its bundles, created if missing."""
    twin = twin_of(params, speed)

    def bundle(precision: str) -> Path:
        quantize = QUANTIZE_BY_PRECISION[precision]
        folder = bundle_of(params, quantize, "demo", speed, logits=logits)
        weights = twin / "target" / "model.safetensors"
        if (folder / "dsbd.json").stat().st_mtime < weights.stat().st_mtime:
            raise click.UsageError(f"{folder} is older than {weights}; delete the bundle")
        return folder

    return Pair(target=twin / "target", draft=twin / "draft", bundle_of=bundle)


def plan_of(
    comparison: Comparison,
    pair: Pair,
    speed: Path,
    num_prompts: int,
    max_new_tokens: int | None,
    num_rounds: int,
) -> Plan:
    """Return the plan, with prompts and ids in the tokens of the pair."""
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    ids = None
    if comparison.num_ids:
        ids = Ids.written(speed, comparison.num_ids, tokenizer.get_vocab_size())
    return Plan(
        prompts=comparison.prompts(tokenizer, num_prompts),
        warm_up=comparison.warm_up(tokenizer),
        max_new_tokens=max_new_tokens or comparison.max_new_tokens,
        num_rounds=num_rounds,
        documents=Documents(tokenizer, end_token_of(pair.target)),
        ids=ids,
    )


@click.command(help=__doc__)
@click.option(
    "--compare",
    "name",
    type=click.Choice(list(COMPARISONS)),
    default=STRATEGIES,
    show_default=True,
    help="Subject.",
)
@click.option("--params", default="150M", show_default=True, help="Parameters of the twin.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The report, JSON.")
@click.option("--peer", "names", multiple=True, help="Tool to compare with [all].")
@click.option(
    "--num-prompts",
    type=click.IntRange(1, len(PROMPTS)),
    default=len(PROMPTS),
)
@click.option("--rounds", default=3, show_default=True)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), help="[48; retrieval: length of an id]"
)
@click.option(
    "--width",
    "widths",
    type=click.IntRange(min=2),
    multiple=True,
    help="Beams of a search, for retrieval [32, 64, 128, 256].",
)
@click.option(
    "--busy", "is_busy", is_flag=True, help="Measure next to a process that takes a core."
)
@click.option("--speed", type=FOLDER, default=BUILD / "speed", help="Folder of twins, bundles.")
@click.option("--work", type=FOLDER, default=BUILD / "peers", help="Folder of the tools.")
@click.option("--print", "is_printed", is_flag=True, help="Only print the tables.")
@writes(RESULTS / "peers.md")
def main(
    name: str,
    params: str,
    output: Path | None,
    names: tuple[str, ...],
    num_prompts: int,
    rounds: int,
    max_new_tokens: int | None,
    widths: tuple[int, ...],
    is_busy: bool,
    speed: Path,
    work: Path,
    is_printed: bool,
    page: Page,
) -> None:
    """Measure unless the report exists; write the tables."""
    if widths and name != RETRIEVAL:
        raise click.UsageError(f"--width is for --compare {RETRIEVAL}, not for {name}")
    comparison = retrieval(widths) if widths else COMPARISONS[name]
    if is_busy:
        comparison = next_to_busy(comparison)
    tool_names = [peer.name for peer in comparison.peers]
    for tool in set(names).difference(tool_names):
        raise click.UsageError(f"--peer is {tool!r}: expected one of {', '.join(tool_names)}")
    suffix = ("" if name == STRATEGIES else f"-{name}") + "-busy" * is_busy
    output = output or speed / f"peers-{params}{suffix}.json"
    if output.exists():
        page.wait = None
    page.begin(*[comparison.section] * (not is_printed))
    if not output.exists():
        pair = pair_of(params, speed, comparison.logits)
        report = compare(
            comparison,
            names,
            pair,
            plan_of(comparison, pair, speed, num_prompts, max_new_tokens, rounds),
            work,
            params=params,
            is_busy=is_busy,
            threads=page.threads,
            report=partial(print, file=sys.stderr),
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    report = json.loads(output.read_text())
    if report.get("comparison", STRATEGIES) != name:
        raise click.UsageError(f"{output} is a report of {report['comparison']}, not of {name}")
    if report.get("is_busy", False) != is_busy:
        raise click.UsageError(
            f"{output} was measured {'without' if is_busy else 'with'} --busy; give another -o"
        )
    tables = tables_of(report)
    if is_printed:
        click.echo(tables)
    else:
        write_section(page.document, comparison.section, tables)
    if broken := broken_checks(report):
        raise click.ClickException("searches that must find the same: " + "; ".join(broken))
