"""``dsbd-export --draft-quantize auto``: tries the draft in int8 and int4, keeps the better one.

A call in int4 reads half of the bytes. But on some processors its matrix products of several rows
take longer than in int8, and an int4 draft agrees with the target less often. So both are measured:
the draft is exported twice, the target once.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_export.changed_bundle import link
from dsbd_ort.benchmark.advice import agreement_of, greedy_gain, measured_costs
from dsbd_ort.benchmark.bench_run import PROMPTS
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.pipeline import Pipeline

AUTO = "auto"
FIRST, SECOND = "int8", "int4"


@dataclass(frozen=True)
class Tried:
    """A draft in one precision: milliseconds of a one-row call, agreement, greedy speed-up."""

    quantize: str
    milliseconds: float
    agreement: float
    gain: float


def check_auto(options: dict[str, Any]) -> None:
    """Raise UsageError if these options leave nothing to compare."""
    if options["draft"] is None:
        raise click.UsageError("--draft-quantize auto compares forms of a draft; give --draft")
    if options["engine"] != "onnx":
        raise click.UsageError(
            f"--draft-quantize auto measures on the CPU, not engines of {options['engine']}; "
            "choose a precision"
        )


def keep_best_draft(
    bundle: Path, options: dict[str, Any], export_draft: Callable[[Path, dict[str, Any]], None]
) -> list[Tried]:
    """Measure the bundle's draft, which is in ``FIRST``, and one in ``SECOND``; keep the better.

    export_draft: exports a draft into a bundle, with such options.
    """
    other = bundle.with_name(f"{bundle.name}.{SECOND}")
    if other.exists():
        raise click.UsageError(f"{other} is in the way of --draft-quantize auto; remove it")
    try:
        shutil.copytree(bundle, other, copy_function=lambda *names: link(*map(Path, names)))
        left_out = ("quantize", "calibration_texts")  # for the target, for int8
        given = {name: value for name, value in options.items() if name not in left_out}
        export_draft(other, given | {"draft_quantize": SECOND})
        first, target = _tried(bundle, FIRST)
        second, _ = _tried(other, SECOND, target)
        if second.gain > first.gain:
            shutil.rmtree(bundle)
            os.replace(other, bundle)
    finally:
        shutil.rmtree(other, ignore_errors=True)
    return [first, second]


def _tried(folder: Path, quantize: str, target: CostCurve | None = None) -> tuple[Tried, CostCurve]:
    """Measure a draft; ``target``: the target's costs if they were measured before."""
    with Pipeline.from_bundle(folder) as pipeline:
        costs = measured_costs(pipeline)
        costs = EngineCosts(target or costs.target, costs.draft)
        gain, agreement = greedy_gain(pipeline, PROMPTS, costs), agreement_of(pipeline, PROMPTS)
    return Tried(quantize, 1e3 * costs.draft.seconds[0], agreement, gain), costs.target


def print_tried(tried: list[Tried]) -> None:
    """Print the measurements on stdout, and which draft was kept."""
    best = max(tried, key=lambda each: each.gain)
    table = Table(title="draft by --draft-quantize, greedy, on this machine")
    for column in ("quantize", "ms of a call", "agreement", "expected speed-up", ""):
        table.add_column(column, justify="right" if column else "left")
    for each in tried:
        cells = (f"{each.milliseconds:.2f}", f"{each.agreement:.1%}", f"{each.gain:.2f}")
        table.add_row(each.quantize, *cells, "kept" if each is best else "")
    Console().print(table)
