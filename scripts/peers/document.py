"""A part of a document that a script writes anew, between two markers."""

from __future__ import annotations

from pathlib import Path


def replace_between(document: Path, begin: str, end: str, text: str) -> None:
    """Put ``text`` between the markers of a document.

    Raises:
        ValueError: a marker is missing; the document is left as it is.
    """
    head, found_begin, rest = document.read_text().partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{document} has no {begin!r} followed by {end!r}; put both lines back")
    document.write_text(f"{head}{begin}\n{text}\n{end}{tail}")
