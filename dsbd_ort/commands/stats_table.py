"""The statistics of a request as a table on stderr."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from dsbd_ort.decoding import DecodingStats


def print_stats(stats: DecodingStats) -> None:
    """Print one row per statistic."""
    table = Table(title="statistics", show_header=False)
    for name, value in dataclasses.asdict(stats).items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)
