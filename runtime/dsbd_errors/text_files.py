"""Text in files of users: UTF-8, with or without a byte order mark."""

import codecs
import gzip
import io

from dsbd_errors.git_lfs import is_pointer

_OTHERS = {  # the mark of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

_HALVES = ([True, False] * 2, [False, True] * 2)
"""Which of the first four bytes are 0 in UTF-16 without a mark, if the text begins in Latin."""


def text_of(content: bytes) -> str:
    """Return the text of a file without its byte order mark; UnicodeError: it is not UTF-8."""
    check_utf_8(content)
    return content.decode("utf-8-sig")


def opened_text(
    file: io.BufferedReader | gzip.GzipFile, newline: str | None = None
) -> io.TextIOWrapper:
    """Return a text file for a file that is open for bytes; see ``text_of``."""
    check_utf_8(file.peek(64))
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)


def check_utf_8(head: bytes) -> None:
    """Raise a UnicodeError that names UTF-16, UTF-32 or git LFS, from the first bytes of a file."""
    if is_pointer(head):
        raise UnicodeError("it is a pointer of git LFS, not the file itself; run 'git lfs pull'")
    name = next((name for mark, name in _OTHERS.items() if head.startswith(mark)), "")
    if not name and [byte == 0 for byte in head[:4]] in _HALVES:
        name = "UTF-16"
    if name:
        raise UnicodeError(f"it is {name}; expected UTF-8: iconv -f {name} -t UTF-8 converts it")
