"""Pointers of git LFS: small text files that a clone without git LFS has in place of large files.

A separate module below all packages, because all code that reads files of users needs it.
"""

from pathlib import Path

_HEAD = b"version https://git-lfs"


def is_pointer(head: bytes) -> bool:
    """Return whether a file with these first bytes is a pointer."""
    return head.startswith(_HEAD)


def pointer_refusal(file: Path) -> str | None:
    """Return the fault and its fix for a file that is a pointer; None for any other file."""
    try:
        if not file.is_file():  # a pipe can be read only once
            return None
        with file.open("rb") as opened:
            if not is_pointer(opened.read(len(_HEAD))):
                return None
    except (OSError, ValueError):  # reported when the file is read
        return None
    folder = file.absolute().parent
    return f"{file} is a pointer of git LFS, not the file itself; run 'git lfs pull' in {folder}"
