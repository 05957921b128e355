"""Files that survive a power cut: synced before they get their name, checked by a checksum.

After a power cut a file system may keep a file's name and size but lose its pages, which then read
as zeros or old data. Synced files lose no pages. A checksum at every opening detects pages that are
lost or damaged later.
"""

import functools
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_CHUNK = 1 << 24
_BLOCK = 1 << 18  # read at a time: fits the cache of a core
_THREADS = 4  # with more, memory or disk is the limit


def checksum(file: Path) -> int:
    """Return the CRC-32 of the CRC-32s of a file's chunks; three times as fast as SHA-256."""
    starts = range(0, file.stat().st_size, _CHUNK)
    with ThreadPoolExecutor(_THREADS) as threads:
        of_chunks = list(threads.map(functools.partial(_chunk_checksum, file), starts))
    return zlib.crc32(np.array(of_chunks, dtype="<u4").tobytes())


def _chunk_checksum(file: Path, start: int) -> int:
    crc, left, block = 0, _CHUNK, memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while left and (num_read := opened.readinto(block[: min(left, _BLOCK)])):
            crc = zlib.crc32(block[:num_read], crc)
            left -= num_read
    return crc


def put_in_place(partial: Path, place: Path) -> None:
    """Give a complete file or folder its name; after a power cut it is complete or absent."""
    if partial.is_dir():
        sync_folder(partial)
    else:
        _sync(partial)
    os.replace(partial, place)
    sync_names(place.parent)


def sync_folder(folder: Path) -> None:
    """Sync all files of a folder to the disk, with their names."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        sync_names(Path(parent))


def sync_names(folder: Path) -> None:
    """Sync the names in a folder to the disk, after a name was added or changed."""
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders, and keeps names by itself
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
