"""Huge pages for the weights of an engine: fewer TLB misses.

An engine reads all of its weights in every call. With pages of 4 KiB their translations do not fit
the TLB, so that calls also wait for page tables (twice as long in a virtual machine), and evict the
translations of other code. Linux gathers memory into pages of 2 MiB if a process requests it. ONNX
Runtime allocates by malloc, which does not.
"""

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
_SMALLEST = 4 << 20  # smaller ranges fit the TLB

Range = tuple[int, int]
"""First address, and the address after the last."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Request huge pages for the memory that the process allocates within the block.

    From Linux 6.1 on the memory is gathered at the end of the block, in a thread, because it takes
    seconds; earlier versions gather over time. Other systems, and those whose administrator set
    ``never``, are left alone. A refusal costs only speed, and is logged at level DEBUG.
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
    """Return whether this system gathers memory on request."""
    if platform != "linux":
        return False
    try:
        return "[never]" not in policy.read_text()
    except OSError:  # a kernel without them
        return False


def private_ranges(maps: str) -> Iterator[Range]:
    """Yield the writeable memory of a process that is not mapped from files, by address.

    maps: content of ``/proc/PID/maps``.
    """
    for line in maps.splitlines():
        addresses, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)


def inner_pages(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the whole huge pages inside the large ranges."""
    for begin, end in ranges:
        first, stop = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if end - begin >= _SMALLEST and first < stop:
            yield first, stop


def _gather(ranges: Iterable[Range]) -> None:
    """Gather memory; the kernel refuses ranges that are gone or cannot be gathered."""
    libc = ctypes.CDLL(None, use_errno=True)
    for begin, end in ranges:
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice):
                number, size = ctypes.get_errno(), (end - begin) >> 20
                _log.debug("madvise %d of %d MiB: error %d", advice, size, number)
