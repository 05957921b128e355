"""Memory of grammars: counted per grammar, and limited for all grammars of a tokenizer together.

The matchers of a grammar share a lexer, which keeps every state that a path has reached: up to 4 kB
each if the grammar has hundreds of terminals. The library does not report its memory. So the memory
of the process is measured before and after its calls. There are two measures:

* the *resident* memory, read in microseconds. It does not grow while a grammar uses memory that
  was freed before. So freed memory is returned to the system (a trim) once it may be 16 MiB.
* the *allocated* memory. Reading it visits all free memory, which takes 0.7 ms once a tokenizer of
  150,000 tokens has been read. So it is used only if the grammars together use half of their limit.
  It includes concurrent allocations of other threads, which even out over many calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dsbd_ort.decoding.errors import ConstraintError

MOST_BYTES = 256 << 20  # limit of all grammars of a tokenizer together
_LONG_LOOK = 5e-4
_TRIM_SECONDS = 1.0  # between two trims
_BYTES_OF_ONE_STEP = 64 << 20  # the masks of one step may add this before memory is counted
_UNSEEN_BYTES = 16 << 20  # freed memory that is not returned to the system at once
_RESERVED_BYTES = _BYTES_OF_ONE_STEP + _UNSEEN_BYTES


class GrammarMemory:
    """Memory of one compiled grammar.

    compiled, followed: bytes allocated while compiling the grammar, and by its requests since then.
    num_requests: requests that use it now.
    has_failed: whether a matcher has failed. Its lexer may be at a limit and accept no token.
    is_over: whether its requests must end because it uses too much memory.
    """

    def __init__(self, name: str, limit: MemoryLimit) -> None:
        self.name = name
        self.compiled = self.followed = self.num_requests = 0
        self.has_failed = self.is_over = False
        self._limit = limit
        self._lock = threading.RLock()  # a pool may be freed while the thread that frees it counts

    @property
    def num_bytes(self) -> int:
        return self.compiled + self.followed

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Count allocations within the block; refuse the grammar if it does not fit."""
        before, resident = held_bytes(), resident_bytes()
        yield
        self.compiled = max(0, held_bytes() - before)
        self._limit.take_in(self, resident_bytes() - resident)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Count allocations within the block; end a request whose grammar uses too much."""
        self.check()
        try:
            with self.counting():
                yield
        except ConstraintError:
            self.has_failed = True
            raise
        self._limit.keep()
        self.check()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count allocations within the block, exactly only if the limit is near."""
        is_exact = self._limit.is_near
        before = held_bytes() if is_exact else resident_bytes()
        try:
            yield
        finally:
            # other parts of the process may have returned memory to the system
            self.add(held_bytes() - before if is_exact else max(0, resident_bytes() - before))

    def add(self, num_bytes: int = 0, *, num_requests: int = 0) -> None:
        """Add allocated bytes and started requests; negative for freed bytes and ended requests."""
        with self._lock:
            self.followed += num_bytes
            self.num_requests += num_requests

    def check(self) -> None:
        if self.is_over:
            raise ConstraintError(
                f"{self.name} uses {self.num_bytes >> 20} MiB, and all grammars in use together "
                f"more than {MOST_BYTES >> 20} MiB; simplify it: fewer terminals, smaller bounds "
                "of repetitions"
            )


class MemoryLimit:
    """Bound of the memory of several grammars. Safe to use from several threads.

    is_near: whether the grammars use half of the limit, so that their memory is counted exactly.
    """

    def __init__(self, most_bytes: int | None, drop_one: Callable[[], bool]) -> None:
        """``drop_one`` drops a grammar that is over its limit or unused; False if there is none."""
        self._most_bytes = most_bytes
        self._drop_one = drop_one
        self._memories: weakref.WeakSet[GrammarMemory] = weakref.WeakSet()
        self._lock = threading.RLock()
        self.is_near = False
        self._num_bytes = 0  # of all grammars at the last step
        self._num_freed = 0  # since the last trim

    def take_in(self, memory: GrammarMemory, growth: int = 0) -> None:
        """Add a grammar, or refuse it: running requests have priority over new ones.

        growth: growth of the process in bytes while compiling it; some of them are free again.
        """
        with self._lock:
            self._memories.add(memory)
            self._num_freed += max(0, growth - memory.num_bytes)
            self._choose_measure()
            if self._is_exceeded():
                memory.is_over = True
                memory.check()

    def keep(self) -> None:
        """End the requests of the largest grammar if the limit is exceeded."""
        with self._lock:
            if self._is_exceeded():
                followed = [each for each in self._counted if each.num_requests]
                largest = max(followed, key=lambda each: each.num_bytes, default=None)
                if largest is not None:
                    largest.is_over = True
                    self._drop_one()
            self._choose_measure()

    def _choose_measure(self) -> None:
        """Set ``is_near``; trim the memory that grammars have freed, so that growth is visible."""
        if self._most_bytes is None:
            return
        num_bytes = sum(memory.num_bytes for memory in self._memories)
        self._num_freed += max(0, self._num_bytes - num_bytes)
        self._num_bytes = num_bytes
        if self._num_freed > _UNSEEN_BYTES and (library := _glibc()) is not None:
            library.malloc_trim(0)
            self._num_freed = 0
        self.is_near = num_bytes > (self._most_bytes - _RESERVED_BYTES) // 2

    @property
    def _counted(self) -> list[GrammarMemory]:
        return [memory for memory in self._memories if not memory.is_over]

    def _is_exceeded(self) -> bool:
        if self._most_bytes is None:
            return False
        limit = self._most_bytes - _RESERVED_BYTES
        while sum(memory.num_bytes for memory in self._counted) > limit:
            if not self._drop_one():
                return True
        return False


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        ).split()
    )


@functools.cache
def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallocInfo
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    return library


def resident_bytes() -> int:
    """Return this process's memory in RAM in bytes, 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


_last_trim = [0.0]  # time of the process's last trim in ``held_bytes``


def held_bytes() -> int:
    """Return the memory that this process has allocated, 0 if the system does not report it.

    Mapped memory would not show growth: one grammar uses the memory that another has freed.
    """
    if (library := _glibc()) is None:
        return 0
    began = time.perf_counter()
    info = library.mallinfo2()
    seconds = time.perf_counter() - began
    # mallinfo2 visits every free piece, and a large grammar leaves a hundred thousand of them.
    # Trimming joins them in a few milliseconds, and returns memory to the system.
    if seconds > _LONG_LOOK and began - _last_trim[0] > _TRIM_SECONDS:
        library.malloc_trim(0)
        _last_trim[0] = began
    return int(info.uordblks) + int(info.hblkhd)
