"""Transcription compared with faster-whisper and transformers: time, word errors, tokens.

The model in CHECKPOINT, a folder of transformers, is exported in fp32 and int8. eSpeak NG reads the
texts in utterances.jsonl, and all tools transcribe them in turn, with the same number of threads
and the same settings. Two sections are not timed. "equality" counts how often segments, tokens and
scores equal those of transformers' generate; "domain" counts word errors with and without a
language model of a domain. All files are kept in WORK and reused.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dsbd_ort import Pipeline
from lab.frame.page import BUILD, RESULTS, Page, writes
from lab.transcription.comparison import Work, lines_of, transcribed
from lab.transcription.domain import domain_table
from lab.transcription.equality import Cases, equality_table, outcomes
from lab.transcription.speech import Spoken, spoken, utterances
from lab.transcription.tools import (
    OURS,
    TOOLS,
    Models,
    OpenTool,
    ct2_folder,
    environment,
    open_tools,
)

SPEED, EQUALITY, DOMAIN = "transcription", "equality", "domain"
OPTIONS_BY_PRECISION = {"fp32": (), "int8": ("--quantize", "int8")}
EXPORT = (sys.executable, "-c", "from dsbd_ort.cli import export; export()")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(help=__doc__)
@click.argument("checkpoint", type=FOLDER)
@click.option("--work", type=click.Path(path_type=Path), default=BUILD / "transcription")
@click.option(
    "--ct2", type=FOLDER, help="The same weights in CTranslate2's format, for faster-whisper."
)
@click.option(
    "--section",
    "sections",
    type=click.Choice((SPEED, EQUALITY, DOMAIN)),
    multiple=True,
    default=(SPEED, EQUALITY),
    show_default=True,
)
@click.option("--beams", type=int, multiple=True, default=(5, 1), show_default=True)
@click.option("--rounds", default=2, show_default=True, help="Rounds of the short files.")
@click.option("--long-rounds", default=1, show_default=True, help="Rounds of the long files.")
@click.option("--cpu-time", is_flag=True, help="CPU time of all threads (less exact).")
@click.option(
    "--most", type=click.IntRange(min=2), help="Maximum of short files; the first are English."
)
@click.option(
    "--tool",
    "names",
    type=click.Choice(sorted({tool.name for tool in TOOLS})),
    multiple=True,
    help="Tool to compare with [all].",
)
@click.option("--words", is_flag=True, help="Also compare words and their times.")
@click.option("--seconds", default=3600.0, help="Time in which equality starts cases.")
@writes(RESULTS / "transcription.md")
def main(
    checkpoint: Path,
    work: Path,
    ct2: Path | None,
    sections: tuple[str, ...],
    beams: tuple[int, ...],
    rounds: int,
    long_rounds: int,
    cpu_time: bool,
    most: int | None,
    names: tuple[str, ...],
    words: bool,
    seconds: float,
    page: Page,
) -> None:
    """Measure and write the sections."""
    files = spoken(work / "utterances", utterances(), environment(work))
    short = [each for each in files if not each.utterance.is_long][:most]
    long = [each for each in files if each.utterance.is_long]
    bundles = {
        precision: _bundle(checkpoint, work, precision) for precision in OPTIONS_BY_PRECISION
    }
    if EQUALITY in sections:
        cases = Cases(checkpoint, bundles["fp32"], short + long, page.threads, have_words=words)
        _count_equal(cases, checkpoint.name, work, seconds, page)
    if DOMAIN in sections:
        with Pipeline.from_bundle(bundles["fp32"], num_threads=page.threads) as pipe:
            lines = domain_table(pipe, work, environment(work), _report)
        page.write(DOMAIN, lines, checkpoint.name)
    folder = None if ct2 is None else ct2_folder(ct2, checkpoint, work)
    models = Models(checkpoint=checkpoint, ct2=folder, bundles=bundles)
    if SPEED in sections:
        page.begin(SPEED)
        works = _works(short, long, beams, rounds, long_rounds)
        _compare(models, works, work, names, cpu_time, page)


def _count_equal(cases: Cases, name: str, work: Path, seconds: float, page: Page) -> None:
    kept = work / f"equality-{name}.jsonl"
    try:
        counted = outcomes(cases, kept, seconds, _report)
    finally:
        cases.close()
    page.write(EQUALITY, equality_table(counted), name)


def _bundle(checkpoint: Path, work: Path, precision: str) -> Path:
    """Return our bundle of a checkpoint; a missing bundle is exported."""
    folder = work / "bundles" / f"{checkpoint.name}-{precision}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        options = OPTIONS_BY_PRECISION[precision]
        words = (*EXPORT, "--target", str(checkpoint), *options, "-o", str(folder))
        click.echo(f"exporting {folder}", err=True)
        subprocess.run(words, check=True)
    return folder


def _works(
    short: list[Spoken], long: list[Spoken], beams: tuple[int, ...], rounds: int, long_rounds: int
) -> list[Work]:
    works = []
    for num_beams in beams:
        if rounds:
            works.append(
                Work(
                    title="Short utterances",
                    spoken=short,
                    num_beams=num_beams,
                    timestamps=False,
                    rounds=rounds,
                )
            )
        if long_rounds:
            works.append(
                Work(
                    title="Long files",
                    spoken=long,
                    num_beams=num_beams,
                    timestamps=True,
                    rounds=long_rounds,
                )
            )
    return works


def _compare(
    models: Models,
    works: list[Work],
    work: Path,
    names: tuple[str, ...],
    cpu_time: bool,
    page: Page,
) -> None:
    lines: list[str] = []
    with _opened(models, work, names, page.threads, cpu_time=cpu_time) as tools:
        for each in works:
            requests = list(transcribed(each, tools, _report))
            lines += [*lines_of(each, tools, requests), ""]
            click.echo("\n".join(lines_of(each, tools, requests)), err=True)
        settings = [f"* {tool.tool.key}: {tool.version}, {tool.settings}" for tool in tools]
    clock = "time of the processor" if cpu_time else "time"
    page.write(SPEED, [*lines, *settings], models.checkpoint.name, clock)


@contextlib.contextmanager
def _opened(
    models: Models, work: Path, names: tuple[str, ...], threads: int, *, cpu_time: bool
) -> Iterator[list[OpenTool]]:
    """Run dsbd-ort and the named tools; () stands for all tools."""
    chosen = [tool for tool in TOOLS if not names or tool.name in (OURS, *names)]
    with contextlib.ExitStack() as stack:
        yield open_tools(chosen, models, work, threads, cpu_time, stack.enter_context, _report)


def _report(text: str) -> None:
    click.echo(text, err=True)
