"""Speed and quality on twins, and the frontier; with --draft, drafts of the demo target.

For each size and precision the command makes the twin and its bundle in the work folder, runs
dsbd-bench on it in a separate process, and keeps the JSON report. Existing files are kept; delete a
JSON file to measure again. Each size has its own section, written from all its reports in the work
folder.

With --draft, drafts of the demo target are compared with the demo draft instead, in another
section: drafts of either kind from dsbd-distill, named by their folders.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import click

from dsbd_ort.benchmark.bench_run import PROMPTS
from lab.frame.page import BUILD, DOCS, RESULTS, Page, writes
from lab.frame.twins import DEMO, HOSTILE, TRAINED, TWIN_OPTIONS, bundle_of, call
from lab.speed.report import (
    FRONTIER_RUNS,
    draft_calls_of,
    plot_frontier,
    same_drafts_of,
    table_of,
)
from scripts.document_sections import write_section

FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
PAGE, DRAFTS = RESULTS / "speed.md", RESULTS / "drafts.md"
PICTURE = DOCS / "images" / "frontier.png"
FRONTIER = "frontier"  # a measurement in addition to those named by the draft
PRECISIONS = {"none": "fp32"} | {kind: kind for kind in ("int8", "int8-blocks", "int4")}

# dsbd-bench adds for every run the baseline: the same distribution without a draft.
RUNS = (
    "speculative draft_length=4 name='speculative, 4'",
    "speculative draft_policy=throughput name='speculative, throughput'",
    "dsbd num_beams=2 width_policy=fixed draft_length=4 draft_beams=2 name='dsbd W=2, 4x2'",
    "dsbd num_beams=2 width_policy=fixed draft_length=4 draft_beams=3 name='dsbd W=2, 4x3'",
    "dsbd num_beams=2 width_policy=fixed draft_length=3 draft_beams=4 name='dsbd W=2, 3x4'",
    "dsbd num_beams=2 draft_policy=throughput name='dsbd W=2, throughput'",
    "dsbd num_beams=4 width_policy=fixed draft_length=3 draft_beams=4 name='dsbd W=4, 3x4'",
    "dsbd num_beams=4 width_policy=fixed draft_length=2 draft_beams=6 name='dsbd W=4, 2x6'",
    "dsbd num_beams=4 width_policy=fixed draft_length=2 draft_beams=8 name='dsbd W=4, 2x8'",
    "dsbd num_beams=4 draft_policy=throughput name='dsbd W=4, throughput'",
    "dsbd num_beams=3 min_beams=2 draft_length=4 draft_beams=3 baseline='beam-sample W=2' "
    "name='dsbd W=3, at least 2'",
    "dsbd num_beams=4 min_beams=2 draft_length=4 draft_beams=4 baseline='beam-sample W=2' "
    "name='dsbd W=4, at least 2'",
    "speculative-beam-search num_beams=4 draft_policy=throughput "
    "name='speculative-beam-search W=4, throughput'",
)
HOSTILE_RUNS = (
    "dsbd num_beams=2 draft_policy=throughput name='dsbd W=2, throughput'",
    "dsbd num_beams=4 draft_policy=throughput name='dsbd W=4, throughput'",
)
FEW_RUNS = (
    "speculative draft_length=4 name='speculative, 4'",
    "speculative draft_policy=throughput name='speculative, throughput'",
    "dsbd num_beams=2 width_policy=fixed draft_length=4 draft_beams=2 name='dsbd W=2, 4x2'",
    "dsbd num_beams=2 draft_policy=throughput name='dsbd W=2, throughput'",
    "dsbd num_beams=4 width_policy=fixed draft_length=2 draft_beams=6 name='dsbd W=4, 2x6'",
    "dsbd num_beams=4 draft_policy=throughput name='dsbd W=4, throughput'",
    "speculative-beam-search num_beams=4 draft_policy=throughput "
    "name='speculative-beam-search W=4, throughput'",
)
RUNS_OF = {DEMO: RUNS, HOSTILE: HOSTILE_RUNS, FRONTIER: FRONTIER_RUNS}
# Runs whose drafts do not depend on the duration of calls.
FIXED_RUNS = tuple(run for run in FEW_RUNS if "throughput" not in run)


def first_prompts(count: int, work: Path) -> Path:
    """Return a file with the first ``count`` of dsbd-bench's own prompts."""
    file = work / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS[:count]))
    return file


def measure(bundle: Path, runs: tuple[str, ...], result: Path, options: list[str]) -> None:
    """Run dsbd-bench on a bundle unless the report ``result`` exists."""
    if result.exists():
        return
    partial = result.with_suffix(".partial")
    of_runs = [word for run in runs for word in ("--run", run)]
    call("dsbd-bench", bundle, *of_runs, *options, "--top-k", "20", "--json", partial)
    partial.rename(result)


@click.command(help=__doc__)
@click.option("--params", multiple=True, default=("150M", "1B"), show_default=True)
@click.option(
    "--quantize",
    type=click.Choice(list(PRECISIONS)),
    multiple=True,
    default=("none", "int8", "int8-blocks"),
    show_default=True,
)
@click.option("--draft", "drafts", type=FOLDER, multiple=True, help="Draft of the demo target.")
@click.option("--work", type=click.Path(path_type=Path), default=BUILD / "speed")
@click.option("--repetitions", default=5, show_default=True)
@click.option("--num-prompts", type=click.IntRange(1, len(PROMPTS)), default=len(PROMPTS))
@click.option("--max-new-tokens", default=48, show_default=True)
@writes(PAGE)
def main(
    params: tuple[str, ...],
    quantize: tuple[str, ...],
    drafts: tuple[Path, ...],
    work: Path,
    repetitions: int,
    num_prompts: int,
    max_new_tokens: int,
    page: Page,
) -> None:
    """Run the missing measurements and write the tables."""
    work.mkdir(parents=True, exist_ok=True)
    options = ["--repetitions", str(repetitions), "--max-new-tokens", str(max_new_tokens)]
    options += ["--threads", str(page.threads), "--prompts", str(first_prompts(num_prompts, work))]
    if drafts:
        page.document = DRAFTS if page.document == PAGE else page.document
        measure_drafts(params, quantize, drafts, work, options, page)
        return
    page.begin(*(f"measured {size}" for size in params))
    wanted = [(size, kind, DEMO) for size in params for kind in quantize]
    if "150M" in params:
        wanted += [("150M", kind, what) for kind in quantize for what in (HOSTILE, FRONTIER)]
    for size, kind, what in wanted:
        bundle = bundle_of(size, kind, HOSTILE if what == HOSTILE else DEMO, work)
        runs = FEW_RUNS if size in TWIN_OPTIONS else RUNS_OF[what]
        measure(bundle, runs, work / f"{size}.{kind}.{what}.json", options)
    for size in {*params} & {*TWIN_OPTIONS}:
        if "none" in quantize:
            measure(
                bundle_of(TRAINED, "none", DEMO, work), FIXED_RUNS, trained_of(size, work), options
            )
    write_tables(work, params, page.document)
    write_frontier(work)


def trained_of(size: str, work: Path) -> Path:
    """Return the report file of the trained pair from which a twin was made."""
    return work / f"{size}.none.{TRAINED}.json"


def measure_drafts(
    params: tuple[str, ...],
    quantize: tuple[str, ...],
    drafts: tuple[Path, ...],
    work: Path,
    options: list[str],
    page: Page,
) -> None:
    """Run the missing measurements of the demo draft and of ``drafts``; write their tables."""
    by_name = {DEMO: DEMO} | {draft.name: draft for draft in drafts}
    unclear = {HOSTILE, *(name for name in by_name if "." in name)}
    if len(by_name) <= len(drafts) or unclear & {*by_name}:
        raise click.UsageError(
            f"--draft has folders {', '.join(draft.name for draft in drafts)}: they name the "
            f"drafts, so all must differ, without a dot, and from {DEMO} and {HOSTILE}; rename them"
        )
    page.begin(*(f"drafts {size}" for size in params))
    folder = work / "drafts"
    folder.mkdir(exist_ok=True)
    for size, kind, name in itertools.product(params, quantize, by_name):
        bundle = bundle_of(size, kind, by_name[name], work)
        measure(bundle, FEW_RUNS, folder / f"{size}.{kind}.{name}.json", options)
    write_drafts(folder, params, page.document)


def write_tables(work: Path, params: tuple[str, ...], document: Path) -> None:
    """Write the tables of all measurements of these sizes into the document."""
    for size in params:
        tables = []
        for (_size, kind, what), report in measured(work, size).items():
            if what not in (FRONTIER, TRAINED):
                draft = "a random draft" if what == HOSTILE else "the demo draft"
                tables.append(table_of(report, f"{size} twin, {PRECISIONS[kind]}, {draft}"))
        twin, trained = work / f"{size}.none.{DEMO}.json", trained_of(size, work)
        if twin.exists() and trained.exists():
            tables.append(same_drafts_of(size, *map(report_in, (twin, trained))))
        write_section(document, f"measured {size}", "\n\n".join(tables))


def write_drafts(folder: Path, params: tuple[str, ...], document: Path) -> None:
    """Write the tables of all measured drafts of these sizes into the document."""
    for size in params:
        reports = {
            f"{size} twin, {PRECISIONS[kind]}, the {name.replace('-', ' ')} draft": report
            for (_size, kind, name), report in measured(folder, size).items()
        }
        tables = [table_of(report, title, level=4) for title, report in reports.items()]
        tables.append(draft_calls_of(reports))
        write_section(document, f"drafts {size}", "\n\n".join(tables))


def write_frontier(work: Path) -> None:
    """Plot quality against speed, with one panel per precision."""
    reports = {
        f"{size} twin, {PRECISIONS[kind]}": report
        for (size, kind, what), report in measured(work).items()
        if what == FRONTIER
    }
    if reports:
        PICTURE.parent.mkdir(exist_ok=True)
        plot_frontier(reports, PICTURE)


def measured(work: Path, size: str = "*") -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the reports in the work folder by (size, quantization, measurement)."""
    reports = {}
    for file in sorted(work.glob(f"{size}.*.*.json")):
        params, quantize, what, *_ = file.name.split(".")
        reports[params, quantize, what] = report_in(file)
    return reports


def report_in(file: Path) -> dict[str, Any]:
    """Return the report of dsbd-bench in a file."""
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report
