"""Sections of a document with measurements, and the tables in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click


def write_section(document: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        click.ClickException: the document lacks one of the two.
    """
    head, tail = text_around(document, name)
    document.write_text(f"{head}\n{text}\n{tail}", encoding="utf-8")


def text_around(document: Path, name: str) -> tuple[str, str]:
    """Return the document up to the section's first mark, and from its last mark on.

    Raises the same exception as ``write_section``.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, begin_mark, rest = document.read_text(encoding="utf-8").partition(begin)
    _, end_mark, tail = rest.partition(end)
    if not (begin_mark and end_mark):
        raise click.ClickException(
            f"{document} has no section from {begin} to {end}; put both lines where it belongs"
        )
    return head + begin, end + tail


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *(f"| {' | '.join(cells)} |" for cells in rows)]
