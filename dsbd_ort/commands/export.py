"""dsbd-export: two checkpoints in, one bundle out, with a table of what was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_ort.commands.termination import orderly_termination
from dsbd_runtime.bundle import MANIFEST_NAME, ROLES, Manifest, ParityReport


def run(options: dict[str, Any], *, demo: bool) -> None:
    """Export; ``options`` are the fields of dsbd_export's ExportConfig.

    Raises:
        click.UsageError: neither a pair nor the demo was asked for, or both.
        click.ClickException: the packages of the export are not installed.
    """
    try:  # here, not at the top: they bring torch, which no other command may load
        from dsbd_export.config import ExportConfig
        from dsbd_export.demo import demo_pair
        from dsbd_export.pipeline import export_bundle
    except ImportError as error:
        raise click.ClickException(
            f"the export needs a package that is not installed ({error.name}); "
            "run: pip install 'dsbd-ort[export]'"
        ) from error
    if demo == bool(options["target"] or options["draft"]):
        raise click.UsageError("give either --demo or both --target and --draft")
    if demo:
        target, draft = demo_pair()
        options = {**options, "target": str(target), "draft": str(draft)}
    if not options["output"]:
        raise click.UsageError("-o is missing; give the folder that the bundle is to be")
    for role in ROLES:
        if not options[role]:
            raise click.UsageError(f"--{role} is missing; give a checkpoint folder or hub id")
    console = Console(stderr=True)
    with orderly_termination():
        result = export_bundle(
            ExportConfig(**options), report=lambda line: console.print(line, highlight=False)
        )
    print_bundle(result.output, result.manifest)


def print_bundle(folder: Path, manifest: Manifest) -> None:
    """Print on stdout the files with their sizes, and what parity measured."""
    files = Table(title=str(folder))
    files.add_column("file")
    files.add_column("bytes", justify="right")
    for name, entry in manifest.files.items():
        files.add_row(name, f"{entry.size:,}")
    files.add_row(MANIFEST_NAME)
    parity = Table(title="compared with the checkpoint in fp32")
    for column in ("model", "max abs logit error", "mean KL", "top-1", "limit"):
        parity.add_column(column, justify="left" if column == "model" else "right")
    for role in ROLES:
        parity.add_row(role, *_parity_cells(getattr(manifest, role).parity))
    console = Console()
    console.print(files)
    console.print(parity)


def _parity_cells(parity: ParityReport) -> tuple[str, ...]:
    """Return the cells of one model: what was measured, and the limit of its measure."""
    name = {"max_abs_error": "error", "mean_kl": "KL"}[parity.measure]
    return (
        f"{parity.max_abs_error:.1e}",
        f"{parity.mean_kl:.1e}",
        f"{parity.top1_agreement:.1%}",
        f"{name} {parity.limit:.0e}",
    )
