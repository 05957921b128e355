"""One request at a time: whoever comes meanwhile from another thread waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from dsbd_errors import DsbdError


class BusyError(DsbdError):
    """A thread asks for something while it holds an unfinished stream itself."""


class RequestLock:
    """Held by a request from its start to its end; a stream may be finished by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no RLock: only its own thread could release that
        self._owner: int | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the request of any other thread; raise BusyError for one of this thread's."""
        if self.is_own:
            raise BusyError(
                "this thread has a stream of this pipeline that is not finished, and would wait "
                "for itself; read the stream to its end, close() it, or open a second pipeline"
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @property
    def is_own(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()
