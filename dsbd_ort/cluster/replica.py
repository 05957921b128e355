"""What runs on a node: a pipeline of its own that answers one line after another."""

from __future__ import annotations

import socket

from dsbd_errors import DsbdError
from dsbd_ort.batch.line_answer import LineAnswer, answer_line
from dsbd_ort.batch.prompt_line import RawLine
from dsbd_ort.batch.settings import BatchSettings
from dsbd_ort.cluster.errors import ClusterError
from dsbd_ort.pipeline import Pipeline


class Replica:
    """An actor. One that cannot work says so when it is asked.

    An actor whose constructor raises would be dead, with a report of Ray's in place of the reason.
    """

    def __init__(self, settings: BatchSettings, fingerprint: str) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._opened: Pipeline | ClusterError
        try:
            self._opened = _opened_alike(settings, fingerprint)
        except DsbdError as error:
            self._opened = ClusterError(f"replica on node {socket.gethostname()}: {error}")

    def check(self) -> None:
        """Raise ClusterError where the bundle could not be opened."""
        self._pipeline()

    def answer(self, line: RawLine) -> LineAnswer:
        """Answer a line."""
        pipeline = self._pipeline()
        answer = answer_line(pipeline, self._settings, self._fingerprint, line, _never)
        assert answer is not None  # nobody interrupts
        return answer

    def _pipeline(self) -> Pipeline:
        if isinstance(self._opened, ClusterError):
            raise self._opened
        return self._opened


def _never() -> bool:
    return False


def _opened_alike(settings: BatchSettings, fingerprint: str) -> Pipeline:
    """Open the bundle; raise where this node's answers would not be those of the others."""
    bundle = settings.pipeline.bundle
    if not bundle.is_dir():
        raise ClusterError(
            f"there is no bundle at {bundle}; copy it to the same path on every node, or put it "
            "into a folder that all of them mount"
        )
    if settings.fingerprint() != fingerprint:
        raise ClusterError(
            f"the bundle at {bundle}, or the version of dsbd-ort, is another one than where the "
            "command runs; give every node the same"
        )
    return settings.pipeline.open()
