"""Work of one size on a device: queued the first two times, then replayed as one recorded unit.

A forward of a small model is hundreds of kernels, and launching them takes longer than running
them; a recorded unit (a CUDA graph) is one launch. Recording does not run the work, so no work is
done twice, and a recorded unit can be replayed from any thread.

The first run makes the engine allocate all memory of the call, because nothing can be allocated
while work is recorded.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dsbd_errors import DsbdError
from dsbd_runtime.devices import Device, RecordedWork

MOST_RECORDED = 64
"""Maximum number of units of one session; each uses kilobytes of device memory per kernel."""

_MOST_TRIES = 3
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RepeatedWork:
    """The copies and the call of one size, whose addresses stay the same.

    all_recorded: the units of a session that exist now, at most ``most_recorded``.
    work: queues the work, piece by piece.
    """

    device: Device
    all_recorded: list[RecordedWork]
    most_recorded: int
    work: Callable[[], None]
    recorded: RecordedWork | None = None
    num_runs: int = 0
    num_tries: int = 0

    def run(self) -> None:
        """Queue the work once; raise what the pieces raise."""
        if self.recorded is not None:
            self.recorded.run()
            return
        self.work()
        self.num_runs += 1
        has_room = len(self.all_recorded) < self.most_recorded
        if self.num_runs > 1 and self.num_tries < _MOST_TRIES and has_room:
            self._record()

    def free(self) -> None:
        """Free the recorded unit; called before the memory that it works on is freed."""
        if self.recorded is not None:
            self.recorded.free()
            self.all_recorded.remove(self.recorded)
            self.recorded = None

    def _record(self) -> None:
        """Record the work that has just run: recording allocates nothing that it has not."""
        self.num_tries += 1
        try:
            self.recorded = self.device.record(self.work)
        except (MemoryError, DsbdError) as error:  # it continues unrecorded
            _log.debug("a call is not recorded, try %d: %s", self.num_tries, error)
        else:
            self.all_recorded.append(self.recorded)
