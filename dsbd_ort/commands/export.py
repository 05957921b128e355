"""dsbd-export: two checkpoints in, one bundle out, with a table of what was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsbd_runtime.bundle import MANIFEST_NAME, MODEL_FILE, ROLES, Manifest


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
    for role in ROLES:
        if not options[role]:
            raise click.UsageError(f"--{role} is missing; give a checkpoint folder or hub id")
    console = Console(stderr=True)
    result = export_bundle(
        ExportConfig(**options), report=lambda line: console.print(line, highlight=False)
    )
    print_bundle(result.output, result.manifest)


def print_bundle(folder: Path, manifest: Manifest) -> None:
    """Print files, sizes and parity errors of a bundle on stdout."""
    table = Table(title=str(folder))
    for column in ("file", "bytes", "parity (max abs logit error)"):
        table.add_column(column, justify="left" if column == "file" else "right")
    for name, entry in manifest.files.items():
        role, _, file = name.partition("/")
        is_engine = role in ROLES and file == MODEL_FILE
        error = f"{getattr(manifest, role).parity.max_abs_error:.1e}" if is_engine else ""
        table.add_row(name, f"{entry.size:,}", error)
    table.add_row(MANIFEST_NAME, "", "")
    Console().print(table)
