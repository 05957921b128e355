"""Swap two folders in one step."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100  # paths are relative to the working folder
_RENAME_EXCHANGE = 2


def swap_folders(first: Path, second: Path) -> bool:
    """Swap what stands at two paths so that neither is ever absent; return whether that was done.

    Linux has a call for it that most of its file systems offer, network folders do not.
    """
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # no Linux, or a C library without it
        return False
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(renameat2(*paths, _RENAME_EXCHANGE) == 0)
