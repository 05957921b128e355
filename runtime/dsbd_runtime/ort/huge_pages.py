"""Huge pages for the weights of an engine: fewer misses of the processor's address translation.

An engine reads all of its weights in every call. In pages of 4 KiB their addresses are more than a
processor remembers, so that a call waits for page tables as well, twice over in a virtual machine,
and what runs after the call finds its own translations gone. Linux gathers memory into pages of
2 MiB where a process asks for it. ONNX Runtime allocates by malloc, which does not ask.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

HUGE_PAGE = 2 << 20
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS = Path("/proc/self/maps")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_SMALLEST = 4 << 20  # of less the processor remembers the addresses

Range = tuple[int, int]
"""First address and the one behind the last."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Ask for huge pages for the memory that the process takes meanwhile.

    Linux 6.1 and later gathers what is there at the end at once, in a thread, as that takes
    seconds; earlier ones by and by. Nothing happens on other systems, nor where the
    administrator has said ``never``. A refusal costs speed alone, and is logged at level DEBUG.
    """
    if not are_offered():
        yield
        return
    before = set(private_ranges(MAPS.read_text()))
    yield
    grown = [found for found in private_ranges(MAPS.read_text()) if found not in before]
    gathering = threading.Thread(
        target=_gather, args=(list(inner_pages(grown)),), name="dsbd-huge-pages", daemon=True
    )
    gathering.start()


def are_offered(platform: str = sys.platform, policy: Path = POLICY) -> bool:
    """Return whether this system gathers memory where a process asks for it."""
    if platform != "linux":
        return False
    try:
        return "[never]" not in policy.read_text()
    except OSError:  # a kernel without them
        return False


def private_ranges(maps: str) -> Iterator[Range]:
    """Yield the memory of a process that can be written and is of no file, by increasing address.

    maps: as ``/proc/PID/maps`` has it.
    """
    for line in maps.splitlines():
        addresses, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)


def inner_pages(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the whole huge pages inside ranges that are worth it."""
    for begin, end in ranges:
        first, behind = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if end - begin >= _SMALLEST and first < behind:
            yield first, behind


def _gather(ranges: Iterable[Range]) -> None:
    """Gather memory; what is no longer there is refused by the kernel, like all that it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    for begin, end in ranges:
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice):
                number, size = ctypes.get_errno(), (end - begin) >> 20
                _log.debug("madvise %d of %d MiB: error %d", advice, size, number)
