"""Pointers of git LFS: small text files that a clone without git LFS has in place of large files.

A file of its own, below all packages: whatever reads files of users asks it.
"""

from pathlib import Path

_HEAD = b"version https://git-lfs"


def is_pointer(head: bytes) -> bool:
    """Return whether a file with these first bytes is a pointer."""
    return head.startswith(_HEAD)


def pointer_refusal(file: Path) -> str | None:
    """Return what is wrong with a file that is a pointer, and the fix; None for any other."""
    try:
        if not file.is_file():  # a pipe has each byte once
            return None
        with file.open("rb") as opened:
            if not is_pointer(opened.read(len(_HEAD))):
                return None
    except (OSError, ValueError):  # reported by whoever reads the file
        return None
    folder = file.absolute().parent
    return f"{file} is a pointer of git LFS, not the file itself; run 'git lfs pull' in {folder}"
