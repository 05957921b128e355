"""Peak memory of dsbd-export on a random checkpoint of gigabytes.

The checkpoint is made in a temporary folder on every call; its draft is tiny. Prints a Markdown
table and, with --stages, one line for each stage of every export.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import click
import torch

from lab.export_memory.random_checkpoint import Architecture, write_random_checkpoint
from lab.export_memory.watched_process import WatchedRun, watch
from scripts.document_sections import table

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHARD_BYTES = 500 * 10**6
LIMIT = 1.5  # peak memory over the size of the weights in the target dtype
TARGET = Architecture(
    num_layers=4,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32768,
)
DRAFT = dataclasses.replace(
    TARGET, num_layers=1, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1
)
COLUMNS = (
    *("stored", "exported", "weights, GB", "peak, GB", "of the weights", "without file pages"),
    *("peak in stage", "seconds"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One export; sizes in bytes. ``weights``: the target's parameters in the exported dtype."""

    stored: str
    dtype: str
    quantize: str
    weights: int
    run: WatchedRun

    @property
    def ratio(self) -> float:
        """Return the peak over the weights."""
        return self.run.peak_resident / self.weights

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        exported = self.dtype if self.quantize == "none" else f"{self.dtype}, {self.quantize}"
        return (
            self.stored,
            exported,
            f"{self.weights / 1e9:.2f}",
            f"{self.run.peak_resident / 1e9:.2f}",
            f"{self.ratio:.2f}",
            f"{self.run.peak_anonymous / self.weights:.2f}",
            self.run.peak_stage,
            f"{self.run.seconds:.0f}",
        )


def measure(
    folder: Path, stored: str, dtype: str, quantize: str, num_parameters: int
) -> Measurement:
    """Export ``folder``/target with ``folder``/draft in a process of its own."""
    output = folder / "bundle"
    command = [str(Path(sys.executable).with_name("dsbd-export")), "-o", str(output)]
    command += ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    command += ["--dtype", dtype, "--quantize", quantize]
    run = watch(command)
    if run.exit_code != 0:
        raise click.ClickException("\n".join(["the export failed:", *run.stderr[-20:]]))
    weights = num_parameters * TORCH_DTYPES[dtype].itemsize
    return Measurement(stored=stored, dtype=dtype, quantize=quantize, weights=weights, run=run)


@click.command(help=__doc__)
@click.option("--stored", default="fp16", type=click.Choice(list(TORCH_DTYPES)), show_default=True)
@click.option(
    "--export",
    "exports",
    multiple=True,
    default=("fp32", "fp16"),
    show_default=True,
    help="dtype, or dtype:quantize; may be given several times.",
)
@click.option("--layers", default=TARGET.num_layers, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Parent of the temporary folder.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write this file too.")
@click.option("--stages", is_flag=True, help="Print every stage.")
def main(
    stored: str,
    exports: tuple[str, ...],
    layers: int,
    folder: Path | None,
    json_file: Path | None,
    stages: bool,
) -> None:
    """Write the checkpoint, export it, print the table; exit 1 above the limit."""
    dtype = TORCH_DTYPES[stored]
    measurements = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        work = Path(temporary)
        target = dataclasses.replace(TARGET, num_layers=layers)
        num_parameters, _ = (
            write_random_checkpoint(
                work / role, architecture, dtype=dtype, shard_bytes=SHARD_BYTES, seed=seed
            )
            for seed, (role, architecture) in enumerate((("target", target), ("draft", DRAFT)))
        )
        for wanted in exports:
            exported, _, quantize = wanted.partition(":")
            measurement = measure(work, stored, exported, quantize or "none", num_parameters)
            measurements.append(measurement)
            if stages:
                print_stages(measurement)
    click.echo("\n".join(table(COLUMNS, [measurement.row() for measurement in measurements])))
    if json_file:
        json_file.write_text(json.dumps([dataclasses.asdict(m) for m in measurements], indent=1))
    sys.exit(any(measurement.ratio > LIMIT for measurement in measurements))


def print_stages(measurement: Measurement) -> None:
    """Print the peaks of each stage in units of the weights."""
    for name, stage in measurement.run.stages.items():
        click.echo(
            f"{name:45} {stage.seconds:6.1f} s"
            f"  {stage.resident / measurement.weights:5.2f} resident"
            f"  {stage.anonymous / measurement.weights:5.2f} anonymous"
        )
