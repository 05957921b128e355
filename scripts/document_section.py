"""Sections of a document that scripts rewrite, and the tables and figures in them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from dsbd_ort.benchmark.bootstrap import Estimate, Spread
from dsbd_ort.benchmark.machine import this_machine

DOCS = Path(__file__).resolve().parents[1] / "docs"


def write_section(document: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        click.ClickException: the document lacks one of the two.
    """
    head, tail = _around(document, name)
    document.write_text(f"{head}\n{text}\n{tail}", encoding="utf-8")


def check_section(document: Path, name: str) -> None:
    """Refuse a document without the section ``name``, before hours of measuring.

    Raises:
        click.ClickException: as ``write_section``.
    """
    _around(document, name)


def _around(document: Path, name: str) -> tuple[str, str]:
    """Return the document up to the section's first mark, and from its last."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found_begin, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise click.ClickException(
            f"{document} has no section from {begin} to {end}; put both lines where it belongs"
        )
    return head + begin, end + tail


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *(f"| {' | '.join(cells)} |" for cells in rows)]


def spread_cell(found: Spread) -> str:
    """Return median and quartiles: 12.3 (11.9 to 12.8)."""
    return f"{found.median:.1f} ({found.quartile_1:.1f} to {found.quartile_3:.1f})"


def ratio_cell(found: Estimate) -> str:
    """Return a ratio with its interval: **1.23** (1.20 to 1.27)."""
    return f"**{found.value:.2f}** ({found.low:.2f} to {found.high:.2f})"


def measured_here(threads: int, *details: str) -> str:
    """Return where and how figures were measured: date, processor, threads, ``details``."""
    parts = (str(datetime.date.today()), this_machine().processor, f"{threads} threads", *details)
    return ", ".join(parts) + "."
