"""Sections of a document between two markers, rewritten by scripts."""

from __future__ import annotations

from pathlib import Path

import click


def write_section(document: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        click.ClickException: the document lacks one of the two.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found_begin, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise click.ClickException(
            f"{document} has no section from {begin} to {end}; put both lines where it belongs"
        )
    document.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
