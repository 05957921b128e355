"""Work of one size on a device: queued the first two times, then replayed as one recorded unit.

A forward of a small model is hundreds of kernels, and launching them takes the host longer than the
device needs to run them; a recorded unit (a CUDA graph) is one launch. Recording does nothing but
record, so no work is done twice, and a unit that was recorded in one thread is replayed from any.

The first run makes the engine take all memory that the call needs: nothing can be allocated while
work is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dsbd_errors import DsbdError
from dsbd_runtime.devices import Device, RecordedWork

MOST_RECORDED = 64
"""The most units of one session; each takes some kilobytes of the device for every kernel."""

_MOST_TRIES = 3
_log = logging.getLogger(__name__)


class Recorder:
    """Counts the units of one session, and refuses more than ``most``.

    Attributes:
        num_recorded: units that exist now.
    """

    def __init__(self, device: Device, most: int) -> None:
        """Record at most so many units; 0: none."""
        self.num_recorded = 0
        self._device = device
        self._most = most

    @property
    def has_room(self) -> bool:
        """Whether another unit may be recorded."""
        return self.num_recorded < self._most

    def record(self, work: Callable[[], None]) -> RecordedWork:
        """Return ``work`` as one unit; raise what ``Device.record`` raises."""
        recorded = self._device.record(work)
        self.num_recorded += 1
        return recorded

    def free(self, recorded: RecordedWork) -> None:
        """Give a unit back."""
        recorded.free()
        self.num_recorded -= 1


class RepeatedWork:
    """The copies and the call of one size, whose addresses stay the same."""

    def __init__(self, recorder: Recorder, work: Callable[[], None]) -> None:
        """``work`` queues it, piece by piece."""
        self._recorder = recorder
        self._work = work
        self._recorded: RecordedWork | None = None
        self._num_runs = 0
        self._num_tries = 0

    def run(self) -> None:
        """Queue the work once; raise what the pieces raise."""
        if self._recorded is not None:
            self._recorded.run()
            return
        self._work()
        self._num_runs += 1
        if self._num_runs > 1 and self._num_tries < _MOST_TRIES and self._recorder.has_room:
            self._record()

    def free(self) -> None:
        """Give the recorded unit back, before the memory that it works on."""
        if self._recorded is not None:
            self._recorder.free(self._recorded)
            self._recorded = None

    def _record(self) -> None:
        """Record the work that has just been queued, as its next run will need all that it did."""
        self._num_tries += 1
        try:
            self._recorded = self._recorder.record(self._work)
        except (MemoryError, DsbdError) as error:  # it goes on piece by piece
            _log.debug("a call is not recorded, try %d: %s", self._num_tries, error)
