"""dsbd-export --list-families: what is known of each family, on stdout."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsbd_export.families import FAMILIES

CAPTION = (
    "A family that is not listed is tried in the same way; every export is compared with its "
    "checkpoint, and refused when they differ. Measured errors: docs/export.md"
)


def print_families() -> None:
    """Print the table of families."""
    table = Table(caption=CAPTION, caption_justify="left")
    for column in ("family", "status", "attention"):
        table.add_column(column, no_wrap=True)
    table.add_column("what is special, or why it is refused")
    for name, family in FAMILIES.items():
        if family.refusal is None:
            experts = ["all experts computed for every row"] if family.has_experts else []
            notes = "; ".join([family.note, *experts])
            table.add_row(name, "supported", family.attention.value, notes)
        else:
            table.add_row(name, "refused", "", family.refusal)
    Console().print(table)
