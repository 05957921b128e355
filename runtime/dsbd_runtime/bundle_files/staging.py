"""Bundle that is being written: a folder next to its final place, moved there when complete.

An export to BUNDLE has its own key K and creates next to BUNDLE

    .BUNDLE.lock-K      locked while its process runs; created first, removed last
    .BUNDLE.partial-K   the new bundle; after a swap, the bundle that it replaced
    .BUNDLE.old-K       only if folders cannot be swapped: the replaced bundle, for a moment

A killed export leaves these files without a lock. The next export to BUNDLE removes them, and
restores the old bundle if its place is empty.
"""

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dsbd_runtime.bundle_files.durable_files import sync_folder, sync_names
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME
from dsbd_runtime.errors import BundleError

_AT_FDCWD = -100  # paths are relative to the working folder
_RENAME_EXCHANGE = 2

_KINDS = ("lock", "partial", "old")
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)

_logger = logging.getLogger(__name__)


def swap_folders(first: Path, second: Path) -> bool:
    """Swap two folders so that neither path is ever absent; return whether it succeeded.

    Linux has a system call for this, which most of its file systems support, but not network
    folders.
    """
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # no Linux, or a C library without it
        return False
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(renameat2(*paths, _RENAME_EXCHANGE) == 0)


@dataclass(frozen=True)
class _Places:
    """The paths of one export to ``final``; ``key`` is different for each export."""

    final: Path
    key: str

    def sibling(self, kind: str) -> Path:
        return self.final.with_name(f".{self.final.name}.{kind}-{self.key}")


@contextlib.contextmanager
def new_bundle(
    path: str | os.PathLike[str], *, swap: Callable[[Path, Path], bool] = swap_folders
) -> Iterator[Path]:
    """Yield an empty folder next to ``path``, moved to ``path`` if the block succeeds.

    A bundle is complete or absent: if the block raises, the folder is removed. An existing
    bundle at ``path`` is replaced at the end. If several exports to one path run concurrently, the
    last to finish wins. A link at ``path`` stays a link.

    swap: swaps two folders in one step, or returns False if it cannot.
    BundleError: ``path`` is something else, or its parent folder is not writable.
    """
    final = Path(os.path.realpath(path))
    places = _Places(final, secrets.token_hex(4))
    lock = FileLock(places.sibling("lock"))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_remains(final)
        _check_replaceable(final)
        lock.acquire()
    except OSError as error:
        raise BundleError(f"cannot write next to {final}: {error.strerror or error}") from error
    try:
        partial = places.sibling("partial")
        partial.mkdir()
        yield partial
        sync_folder(partial)
        _check_replaceable(final)
        _put_in_place(places, swap)
        sync_names(final.parent)
    finally:
        _settle(places)
        lock.release()
        places.sibling("lock").unlink(missing_ok=True)


def _check_replaceable(final: Path) -> None:
    if not final.exists() or (final / MANIFEST_NAME).exists():
        return
    if not final.is_dir() or any(final.iterdir()):
        raise BundleError(f"{final} exists and is not a bundle; remove it or choose another output")


def _put_in_place(places: _Places, swap: Callable[[Path, Path], bool]) -> None:
    """Move the partial folder to its place, in one step if the file system supports it."""
    partial, final, old = places.sibling("partial"), places.final, places.sibling("old")
    while not _moved(partial, final) and not swap(partial, final):
        shutil.rmtree(old, ignore_errors=True)  # from the round before
        with contextlib.suppress(FileNotFoundError):  # another export was faster
            final.rename(old)


def _moved(partial: Path, final: Path) -> bool:
    """Rename ``partial`` to ``final``; return False if a bundle is there."""
    try:
        partial.rename(final)
    except OSError as error:
        if error.errno in _NOT_EMPTY:
            return False
        raise
    return True


def _remove_remains(final: Path) -> None:
    """Clean up after killed exports to ``final``; skip those that still run."""
    prefixes = tuple(f".{final.name}.{kind}-" for kind in _KINDS)
    names = (path.name for path in final.parent.iterdir() if path.name.startswith(prefixes))
    for key in {name.rpartition("-")[2] for name in names}:
        places = _Places(final, key)
        try:
            with FileLock(places.sibling("lock"), blocking=False):
                _settle(places)
            places.sibling("lock").unlink(missing_ok=True)
        except Timeout:
            continue
        except PermissionError as error:
            _logger.warning("cannot remove the files of a killed export: %s", error)


def _settle(places: _Places) -> None:
    """Restore the old bundle if its place is empty; remove the other folders."""
    old = places.sibling("old")
    if old.exists() and not places.final.exists():
        old.rename(places.final)
    for folder in (old, places.sibling("partial")):
        shutil.rmtree(folder, ignore_errors=True)
