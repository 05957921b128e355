"""Output files that are written at once, so that two processes never mix their texts."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from filelock import lock_descriptor


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace a file's content by a text or bytes; links to the file stay valid.

    A regular file is locked meanwhile. OSError: it cannot be written, or is locked.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    with open(descriptor, "wb") as opened:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            is_ours = True
            with contextlib.suppress(OSError):  # no locks on this file system: a rare conflict
                is_ours = lock_descriptor(descriptor, blocking=False)
            if not is_ours:
                raise BlockingIOError(errno.EAGAIN, "another process is writing to it")
            opened.truncate()
        opened.write(content.encode() if isinstance(content, str) else content)
