"""dsbd-distill: trains a draft for a target, on texts and on the target's continuations."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_distill.config import DistillConfig
from dsbd_ort.benchmark.forecast import forecast
from dsbd_ort.commands.export import export_packages, working
from dsbd_ort.commands.option_types import COUNT_OR_NONE, FiniteRange
from dsbd_ort.commands.options import group, no_flag, option
from dsbd_ort.speech.prompted.prompted_transcription import learned_prompts
from dsbd_ort.speech.speech_request import heard_windows
from dsbd_ort.speech.transcript import TASKS
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.draft_record import DraftRecord, ExpectedSpeed

if TYPE_CHECKING:
    from dsbd_distill.draft_run import TrainedDraft

_MOST_MINUTES = 60.0 * 24 * 365
_TRAINING = "Training"  # section of the help


@dataclass(frozen=True, kw_only=True)
class DistillArguments:
    """The arguments of dsbd-distill; all except ``measures_speed`` are fields of DistillConfig."""

    draft: dict[str, Any] = group(
        dict,
        record=DistillConfig,
        section="Draft",
        target=option(required=True, help="Checkpoint folder or hub id of the large model."),
        output=option(
            "-o",
            "--output",
            required=True,
            help="Folder of the draft; work in progress is in OUTPUT.work.",
        ),
        kind="model: a small model of its own; feature: one transformer layer that reads hidden "
        "states of the target (EAGLE-3).",
        params=option(
            metavar="30M", help="Maximum parameters of the draft [a tenth of the target's]."
        ),
        target_layers="Instead of --params: begin with this many transformer layers of the target, "
        "which sets the width too. Always used for an encoder-decoder, with layers of its decoder "
        "[1], and by default for a language model that reads sound [2].",
        layers_of=option(
            "--from",
            metavar="DRAFT",
            help="With --target-layers: begin with layers of this checkpoint, a small model with "
            "the target's tokenizer, instead of the target's.",
        ),
        draft_vocab=option(
            metavar="8192",
            help="Propose only so many of the most frequent tokens. With a large vocabulary the "
            "head takes most of the time of a training step and of a call [all].",
        ),
        revision="Branch, tag or commit on the hub.",
        trust_remote_code="Run the Python code of a checkpoint.",
    )
    texts: dict[str, Any] = group(
        dict,
        record=DistillConfig,
        section="Texts",
        data=option(
            required=True,
            metavar="TEXTS",
            help="File, folder or pattern ('docs/**/*.md') of UTF-8 texts; in a .jsonl file each "
            'line is a text, or a chat, {"messages": [...]}, that the target answers. For an '
            "encoder-decoder each line is a source; for a speech model give files of audio. May be "
            "repeated.",
        ),
        exclude=option(
            metavar="PATTERN",
            help="Leave out files of these names ('*/vendor/*'). May be repeated.",
        ),
        learn_answers="Also learn, as texts, the answers that the chats contain.",
        language=option(
            metavar="CODE",
            help="For a speech model: the language of all audio, such as de [detected].",
        ),
        task=option(
            type=click.Choice(TASKS),
            help="For a speech model: what the draft learns to write [transcribe].",
        ),
    )
    training: dict[str, Any] = group(
        dict,
        record=DistillConfig,
        section=_TRAINING,
        coverage=option(
            metavar="BEAMS",
            help="Learn to propose each of the target's BEAMS best tokens, for searches with that "
            "many beams.",
        ),
        minutes=option(
            type=FiniteRange(0, _MOST_MINUTES, min_open=True),
            help="Total training time, including runs that were stopped and resumed.",
        ),
        steps="Optimizer steps instead of minutes, for the same draft on a slower machine.",
        seed=option(type=COUNT_OR_NONE, help="Seed of all random numbers."),
        num_threads=option(
            "--threads", help="Threads that compute; leave cores free for other work [all]."
        ),
    )
    measures_speed: bool = no_flag(
        "--no-speed",
        help="Do not export the pair to measure what speed to expect.",
        section=_TRAINING,
    )


def run(arguments: DistillArguments) -> None:
    """Train the draft and print its measurements."""
    with export_packages():
        from dsbd_distill.draft_run import distill
    config = DistillConfig(**arguments.draft, **arguments.texts, **arguments.training)
    with working() as report:
        record = distill(
            config,
            report=report,
            hear=heard_windows,
            ask=learned_prompts,
            measure_speed=measure_speed if arguments.measures_speed else None,
        )
    print_record(config.output, record)
    command = ["dsbd-export", "--target", config.target, "--draft", str(config.output)]
    click.echo(f"export it with: {shlex.join([*command, '-o', 'BUNDLE'])}", err=True)


def measure_speed(trained: TrainedDraft) -> tuple[list[ExpectedSpeed], str]:
    """Export target and draft in fp32 and measure their engines on the CPU."""
    from dsbd_export.config import ExportConfig
    from dsbd_export.pipeline import export_bundle

    config = ExportConfig(
        target=str(trained.target), draft=str(trained.folder), output=trained.bundle
    )
    export_bundle(config, report=lambda _: None)
    speeds = forecast(open_bundle(trained.bundle), trained.requests, are_chats=trained.are_chats)
    return speeds, "fp32, cpu"


def print_record(folder: Path, record: DraftRecord) -> None:
    """Print the measurements of a draft on stdout."""
    console = Console()
    table = Table(title=str(folder))
    table.add_column()
    table.add_column(justify="right")
    for name, value in record_rows(record).items():
        table.add_row(name, value)
    console.print(table)
    if not record.speeds:
        return
    speeds = Table(title=f"expected, {record.measured_on}")
    for column in ("beams", "strategy", "tokens an iteration", "speed-up"):
        speeds.add_column(column, justify="left" if column == "strategy" else "right")
    for speed in record.speeds:
        sampled = "speculative" if speed.num_beams == 1 else "dsbd"
        strategy = "speculative-beam-search" if speed.is_greedy else sampled
        cells = (f"{speed.tokens_per_iteration:.2f}", f"{speed.speedup:.2f}x")
        speeds.add_row(str(speed.num_beams), strategy, *cells)
    console.print(speeds)


def record_rows(record: DraftRecord) -> dict[str, str]:
    """Return the measurements of a draft as texts, by their names in the table."""
    share = record.num_parameters / record.num_target_parameters
    top_p = "" if record.top_p == 1.0 else f", top-p {record.top_p:g}"
    held_out = "sources" if record.are_sources else "chats" if record.are_chats else "texts"
    by_depth = ", ".join(f"{rate:.3f}" for rate in (record.acceptance_by_depth or ())[1:])
    return {
        "acceptance": f"{record.acceptance:.3f} (standard error {record.acceptance_error:.3f})",
        **({"after drafted tokens": by_depth} if record.acceptance_by_depth is not None else {}),
        **_greedy(record),
        "of": f"temperature {record.temperature:g}, top-k {record.top_k}{top_p}, "
        f"held-out {held_out}",
        "before the training": f"{record.curve[0].acceptance:.3f}",
        "target": record.target,
        "parameters": f"{record.num_parameters:,} ({share:.1%} of the target's)",
        "trained": f"{record.steps:,} steps, {record.minutes:.1f} minutes",
    }


def _greedy(record: DraftRecord) -> dict[str, str]:
    if record.greedy_acceptance is None or record.coverage is None:
        return {}
    beams = record.coverage_beams
    return {
        "of greedy tokens": f"{record.greedy_acceptance:.3f}",
        f"of the {beams} best, among {beams}": f"{record.coverage:.3f}",
    }
