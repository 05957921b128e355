"""The pipelines that the caller has open, by the number that stands for each in C."""

from __future__ import annotations

import contextlib
import itertools
import threading

from dsbd_ort.embedding.arguments import Opening
from dsbd_ort.engine import Service
from dsbd_runtime.errors import InputError


class OpenPipelines:
    """Opens, finds and closes; for all threads. Numbers begin with 1 and are never used again."""

    def __init__(self) -> None:
        self._service_by_number: dict[int, Service] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def open(self, asked: Opening) -> int:
        """Open a bundle, return its number."""
        with contextlib.ExitStack() as stack:
            service = Service(stack.enter_context(asked.pipeline.open()), asked.limits)
            stack.pop_all()  # it stays open
        with self._lock:
            number = next(self._numbers)
            self._service_by_number[number] = service
        return number

    def service(self, number: int) -> Service:
        """Return what serves the requests of an open pipeline."""
        with self._lock:
            return _known(self._service_by_number.get(number))

    def close(self, number: int) -> None:
        """Refuse new requests, finish those of other threads, release the engines."""
        with self._lock:
            service = _known(self._service_by_number.pop(number, None))
        service.close()
        service.pipeline.close()


def _known(service: Service | None) -> Service:
    if service is None:
        raise InputError(
            "this pipeline is not open; give one that dsbd_open wrote and that is not closed yet"
        )
    return service
