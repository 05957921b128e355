"""Transcripts beside faster-whisper and transformers: time, word errors, and the same tokens.

One model, in CHECKPOINT as transformers has it, is exported in fp32 and int8-dynamic. All tools
transcribe what eSpeak NG reads of the texts in utterances.jsonl, in turn, on the same threads and
with the same settings. The section "equality" is not timed: it counts how often segments, tokens
and scores are those of transformers' generate. All that is made lies in WORK, and is not made
again.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import click

from lab.frame.page import BUILD, RESULTS, Page, writes
from lab.transcription.comparison import Work, lines_of, transcribed
from lab.transcription.speech import Spoken, spoken, utterances
from lab.transcription.tools import TOOLS, Models, ct2_folder, environment, open_tools

SPEED, EQUALITY = "transcription", "equality"
OPTIONS_BY_PRECISION = {"fp32": (), "int8": ("--quantize", "int8-dynamic", "--attention", "fused")}
EXPORT = (sys.executable, "-c", "from dsbd_ort.cli import export; export()")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(help=__doc__)
@click.argument("checkpoint", type=FOLDER)
@click.option("--work", type=click.Path(path_type=Path), default=BUILD / "transcription")
@click.option(
    "--ct2", type=FOLDER, help="The same weights in CTranslate2's form, for faster-whisper."
)
@click.option(
    "--section",
    "sections",
    type=click.Choice((SPEED, EQUALITY)),
    multiple=True,
    help="Both by default.",
)
@click.option("--beams", type=int, multiple=True, default=(5, 1), show_default=True)
@click.option("--rounds", default=2, show_default=True, help="Of the short files.")
@click.option("--long-rounds", default=1, show_default=True, help="Of the long ones.")
@click.option("--most", type=int, help="Short files, at most; of a model of English those alone.")
@click.option(
    "--tool",
    "names",
    type=click.Choice(sorted({tool.name for tool in TOOLS})),
    multiple=True,
    help="Beside ours; all by default.",
)
@writes(RESULTS / "transcription.md")
def main(
    checkpoint: Path,
    work: Path,
    ct2: Path | None,
    sections: tuple[str, ...],
    beams: tuple[int, ...],
    rounds: int,
    long_rounds: int,
    most: int | None,
    names: tuple[str, ...],
    page: Page,
) -> None:
    """Measure, and write the sections."""
    sections = sections or (SPEED, EQUALITY)
    files = spoken(work / "utterances", utterances(), environment(work))
    short = [each for each in files if not each.utterance.is_long][:most]
    long = [each for each in files if each.utterance.is_long]
    bundles = {precision: _bundle(checkpoint, work, precision) for precision in OPTIONS_BY_PRECISION}
    if SPEED in sections:
        folder = None if ct2 is None else ct2_folder(ct2, checkpoint, work)
        models = Models(checkpoint=checkpoint, ct2=folder, bundles=bundles)
        page.begin(SPEED)
        works = _works(short, long, beams, rounds, long_rounds)
        _compare(models, works, work, names, page)


def _bundle(checkpoint: Path, work: Path, precision: str) -> Path:
    """Return our bundle of a checkpoint, exported if missing."""
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
    models: Models, works: list[Work], work: Path, names: tuple[str, ...], page: Page
) -> None:
    chosen = [tool for tool in TOOLS if tool.counterpart is None or tool.name in (names or TOOL_NAMES)]
    lines: list[str] = []

    def report(text: str) -> None:
        click.echo(text, err=True)

    with contextlib.ExitStack() as stack:
        tools = open_tools(chosen, models, work, page.threads, stack.enter_context, report)
        for each in works:
            found = list(transcribed(each, tools, report))
            lines += [*lines_of(each, tools, found), ""]
            click.echo("\n".join(lines_of(each, tools, found)), err=True)
        settings = [f"* {tool.tool.key}: {tool.version}, {tool.settings}" for tool in tools]
    page.write(SPEED, [*lines, *settings], models.checkpoint.name)


TOOL_NAMES = tuple(tool.name for tool in TOOLS)
