"""dsbd-export: checkpoints to a bundle; a draft or TensorRT engines for an existing bundle."""

import contextlib
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_export.checkpoints.families import FAMILIES
from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.progress import silenced_libraries
from dsbd_export.tensorrt.tensorrt_options import TensorrtOptions
from dsbd_ort.batch.answers import handled_signals
from dsbd_ort.commands.draft_precision import (
    AUTO,
    FIRST,
    check_auto,
    keep_best_draft,
    print_tried,
)
from dsbd_ort.commands.one_line import packages_of
from dsbd_ort.commands.option_types import PATH, TOLERANCE
from dsbd_ort.commands.options import flag, group, option
from dsbd_ort.commands.progress import shown_progress
from dsbd_ort.requests.option_defaults import check_defaults
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, Manifest

ENGINE_OPTIONS = ("bundle", "engine", "compute_capability", "capacity")
"""Options that may accompany --bundle without --draft."""
NOT_OF_DRAFT = ("target", "adapter", "output", "demo", "features")
"""Options that may not accompany --bundle with --draft."""
ACCEPTING_OPTIONS = ("bundle", "accept_parity", "output")
"""Options that --accept-parity needs; no others may accompany it."""
CAPTION = (
    "A family that is not listed is tried in the same way; every export is compared with its "
    "checkpoint and refused if they disagree. Measured errors: docs/export.md"
)
_MODELS, _PARITY = "Models", "Comparison with the checkpoint"  # sections of the help
_EXIT_CODE = 128 + signal.SIGTERM  # as shells report a command that this signal ended


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """The arguments of dsbd-export; ``options`` are fields of ExportConfig or DraftConfig."""

    models: dict[str, Any] = group(
        dict,
        record=ExportConfig,
        section=_MODELS,
        target="Checkpoint folder, hub id or GGUF file of the large model.",
        adapter="Adapter (PEFT) folder or hub id, merged into the target.",
        draft="Checkpoint folder, hub id or GGUF file of the small model; may be added later. Or "
        "mtp: the head for multi-token prediction in the target's checkpoint.",
        draft_adapter="Adapter that is merged into the draft.",
        draft_vocab=option(
            metavar="32768",
            help="How many different tokens the draft may propose; with a large vocabulary its "
            "head takes most of its time [all].",
        ),
        draft_texts=option(
            metavar="TEXTS",
            help="File, folder or pattern of texts: the draft proposes their most frequent tokens "
            "[the tokens with the lowest ids]. May be repeated.",
        ),
        output=option("-o", "--output", help="Folder of the bundle."),
        revision="Branch, tag or commit on the hub.",
        trust_remote_code="Run the Python code of a checkpoint.",
        num_threads=option(
            "--threads", help="Threads that compute; leave cores free for other work [all]."
        ),
    )
    demo: bool = flag(help="Export the demo pair of a checkout of dsbd-ort.", section=_MODELS)
    bundle: Path | None = option(
        type=PATH,
        help="A bundle to change: with --draft to add or replace its draft, with --engine alone to "
        "build TensorRT engines from its ONNX files, without a checkpoint.",
        section=_MODELS,
    )
    engines: dict[str, Any] = group(
        dict,
        record=ExportConfig,
        section="What the engines compute and return",
        dtype="fp32, fp16 or bf16.",
        quantize="none, int8 or int4; int8-blocks: int8 weights in blocks, closer to the "
        "checkpoint and slower for several rows.",
        draft_quantize="The same for the draft only; auto: int8 and int4 are tried on this "
        "machine, and the faster pair is kept [as --quantize].",
        calibration_texts=option(
            metavar="TEXTS",
            help="File, folder or pattern of texts like your requests; int8 uses them to choose "
            "the form of each matrix product [a built-in text]. May be repeated.",
        ),
        logits="full: engines return all logits of a row; topk:K: they return the K largest and "
        "keep the others; auto: topk:64 for a vocabulary of 16,384 tokens or more, except for a "
        "speech model, else full.",
        features="The target also returns hidden states, for a feature draft that is added later.",
        attention="fused; grouped: query heads that share a key head become rows of one head; "
        "exact: logits depend only on a row's path, bit for bit [exact with int8 in fp32, "
        "if the model has that form; else fused].",
        form="portable; cuda: fewer kernels on a GPU, with operators of ONNX Runtime; webgpu: for "
        "its WebGPU plug-in. With cuda and webgpu, int8 means int8-blocks.",
        text_only="Export only the text part of a model that reads sound or pictures in prompts, "
        "for fp16, GPUs and TensorRT.",
        max_context="Cap the context length of the bundle.",
        max_source="Cap the sources of an encoder-decoder likewise.",
    )
    tensorrt: dict[str, Any] = group(
        dict,
        record=ExportConfig,
        section="TensorRT",
        engine="onnx; tensorrt or tensorrt-rtx: TensorRT engines in addition to the ONNX files.",
        compute_capability=option(
            metavar="12.0", help="GPU that a tensorrt-rtx engine is for [this machine's]."
        ),
        capacity="Cache rows of TensorRT engines [the context, at most 4096].",
    )
    parity: dict[str, Any] = group(
        dict,
        record=ExportConfig,
        section=_PARITY,
        atol="Largest logit error allowed in fp32 [1e-4].",
        max_kl="Largest mean KL divergence allowed otherwise.",
    )
    accept_parity: float | None = option(
        type=TOLERANCE,
        metavar="LIMIT",
        help="With --bundle OUTPUT.refused -o OUTPUT: finish an export that was refused for errors "
        "up to this limit. The bundle records this.",
        section=_PARITY,
    )

    @property
    def options(self) -> dict[str, Any]:
        return {**self.models, **self.engines, **self.tensorrt, **self.parity}


def run(arguments: ExportArguments, given: dict[str, str]) -> None:
    """Export, or change the bundle of --bundle; ``given`` are the flags on the command line."""
    options, draft = arguments.options, arguments.models["draft"]
    if tries_precisions := options["draft_quantize"] == AUTO:
        check_auto(options)
        options["draft_quantize"] = FIRST
    if arguments.accept_parity is not None:
        accept(arguments, arguments.accept_parity, given)
        return
    if arguments.bundle is None:
        folder = export(arguments, options)
        if tries_precisions:
            print_tried(keep_best_draft(folder, options, export_draft))
        return
    for name, long_flag in given.items():
        if draft is None and name not in ENGINE_OPTIONS:
            raise click.UsageError(
                f"--bundle takes its models from the bundle; leave out {long_flag}"
            )
        if draft is not None and name in NOT_OF_DRAFT:
            raise click.UsageError(
                f"--bundle with --draft changes the draft of a bundle and keeps its target; leave "
                f"out {long_flag}"
            )
    if draft is not None:
        export_draft(arguments.bundle, options)
        if tries_precisions:
            print_tried(keep_best_draft(arguments.bundle, options, export_draft))
    elif "engine" in given:
        build_engines(arguments.bundle, arguments.tensorrt)
    else:
        raise click.UsageError(
            "--bundle changes a bundle; give --draft to add or replace its draft, or --engine "
            "tensorrt or tensorrt-rtx to build engines"
        )


def export(arguments: ExportArguments, options: dict[str, Any]) -> Path:
    """Export a target, with or without a draft; print the bundle's files, return its folder.

    options: the options of the arguments, with the draft's precision instead of "auto".
    """
    if arguments.demo == bool(options["target"] or options["draft"]):
        raise click.UsageError("give either --demo or --target, with or without --draft")
    if not options["output"]:
        raise click.UsageError("-o is missing; give the folder of the bundle")
    if not arguments.demo and not options["target"]:
        raise click.UsageError(
            "--target is missing; give a checkpoint folder or hub id, or with --bundle the bundle "
            "that the draft is for"
        )
    with export_packages():
        from dsbd_export.demo import demo_pair
        from dsbd_export.pipeline import export_bundle
    if arguments.demo:
        target, draft = demo_pair()
        options |= {"target": str(target), "draft": str(draft)}
    with working() as report:
        result = export_bundle(
            ExportConfig(**options), report=report, check_defaults=check_defaults
        )
    print_bundle(result.output, result.manifest)
    if result.manifest.draft is None:
        print_no_draft(result.output)
    return result.output


def export_draft(bundle: Path, options: dict[str, Any]) -> None:
    """Export a draft into a bundle and print its files."""
    with export_packages():
        from dsbd_export.draft_export import export_draft as export_into
    names = {field.name for field in fields(DraftConfig)} & options.keys()
    with working() as report:
        config = DraftConfig(bundle=bundle, **{name: options[name] for name in names})
        result = export_into(config, report=report)
    print_bundle(result.output, result.manifest)


def accept(arguments: ExportArguments, limit: float, given: dict[str, str]) -> None:
    """Make a refused export a bundle and print its files."""
    output = arguments.models["output"]
    if arguments.bundle is None or output is None:
        raise click.UsageError(
            "--accept-parity finishes a refused export; give --bundle OUTPUT.refused and -o OUTPUT"
        )
    if others := [given[name] for name in given if name not in ACCEPTING_OPTIONS]:
        raise click.UsageError(
            f"--accept-parity keeps what was exported; leave out {', '.join(others)}"
        )
    with export_packages():
        from dsbd_export.gate.refused_bundle import accept_refused
    with orderly_termination():
        manifest = accept_refused(arguments.bundle, limit, output)
    print_bundle(output, manifest)


@contextlib.contextmanager
def export_packages() -> Iterator[None]:
    """Allow imports of the export's packages, which import torch, in the block."""
    with packages_of("the export", "export"), silenced_libraries():
        yield


def build_engines(bundle: Path, options: dict[str, Any]) -> None:
    """Build TensorRT engines for a bundle, print its files; ``options``: for TensorrtOptions."""
    with packages_of("building engines", "tensorrt", "tensorrt-rtx"):
        from dsbd_export.tensorrt.tensorrt_build import add_engines
    with working() as report:
        manifest = add_engines(bundle, TensorrtOptions(**options), report=report)
    print_bundle(bundle, manifest)


def print_bundle(folder: Path, manifest: Manifest) -> None:
    """Print on stdout the files with their sizes, and the measured parity."""
    files = Table(title=str(folder))
    files.add_column("file")
    files.add_column("bytes", justify="right")
    for name, entry in manifest.files.items():
        files.add_row(name, f"{entry.size:,}")
    files.add_row(MANIFEST_NAME)
    parity = Table(title="compared with the checkpoint in fp32")
    for column in ("model", "max abs logit error", "mean KL", "top-1", "limit"):
        parity.add_column(column, justify="left" if column == "model" else "right")
    for role, model in manifest.entry_by_role.items():
        measured = model.parity
        measure = {"max_abs_error": "error", "mean_kl": "KL"}[measured.measure]
        accepted = "" if measured.accepted is None else f", accepted {measured.accepted:.1e}"
        parity.add_row(
            role,
            f"{measured.max_abs_error:.1e}",
            f"{measured.mean_kl:.1e}",
            f"{measured.top1_agreement:.1%}",
            f"{measure} {measured.limit:.0e}{accepted}",
        )
    console = Console()
    console.print(files)
    console.print(parity)


def print_no_draft(folder: Path) -> None:
    """Print on stderr how to add a draft to a bundle without a draft."""
    command = shlex.join(["dsbd-export", "--bundle", str(folder), "--draft", "DRAFT"])
    Console(stderr=True).print(
        f"no draft: requests draft by n-grams; add a draft with: {command}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def print_families() -> None:
    """Print the table of families."""
    table = Table(caption=CAPTION, caption_justify="left")
    for column in ("family", "status", "attention"):
        table.add_column(column, no_wrap=True)
    table.add_column("notes, or why it is refused")
    for name, family in FAMILIES.items():
        if family.refusal is None:
            experts = ["all experts computed for every row"] if family.has_experts else []
            notes = "; ".join([family.note, *experts])
            table.add_row(name, "supported", family.attention.value, notes)
        else:
            table.add_row(name, "refused", "", family.refusal)
    Console().print(table)


@contextlib.contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress; libraries print nothing, SIGTERM is an exception."""
    with orderly_termination(), silenced_libraries(), shown_progress() as report:
        yield report


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Turn SIGTERM, which would skip every ``finally``, into an exception inside the block."""
    with handled_signals([signal.SIGTERM], _raise_exit):
        yield


def _raise_exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(_EXIT_CODE)
