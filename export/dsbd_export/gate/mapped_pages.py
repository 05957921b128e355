"""Pages of mapped files that count as memory no longer than they are used."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

_PERIOD_S = 0.05
_MADV_DONTNEED = 4
_MAPS = Path("/proc/self/maps")


@contextlib.contextmanager
def dropped_pages(file: Path, period_s: float = _PERIOD_S) -> Iterator[None]:
    """Inside the block, release the mapped pages of ``file`` every ``period_s`` seconds.

    A page counts as memory of this process from its first use on. Changes to pages would be lost.
    """
    ranges = _mapped_ranges(file)
    if not ranges:
        yield
        return
    is_over = threading.Event()
    dropper = threading.Thread(target=_drop_until, args=(is_over, ranges, period_s), daemon=True)
    dropper.start()
    try:
        yield
    finally:
        is_over.set()
        dropper.join()


def _drop_until(is_over: threading.Event, ranges: list[tuple[int, int]], period_s: float) -> None:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while True:
        for start, end in ranges:
            advise(start, end - start, _MADV_DONTNEED)
        if is_over.wait(period_s):
            return


def _mapped_ranges(file: Path) -> list[tuple[int, int]]:
    """Return the addresses (start, end) at which parts of a file are mapped."""
    if not _MAPS.exists():
        return []
    ranges, resolved = [], str(file.resolve())
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        addresses, *_, path = f"{line} ".split(" ", maxsplit=5)
        if path.strip() == resolved:
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges
