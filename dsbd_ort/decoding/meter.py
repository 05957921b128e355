"""What a request asks of one engine: calls, rows and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Meter:
    """Counts the calls and rows of a request and their time; cache moves count as time too.

    Attributes:
        clock: seconds.
        calls: engine calls that the request took part in.
        rows: its own rows in them.
        seconds: of the calls; of one that requests shared, each of them has it all.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.calls = 0
        self.rows = 0
        self.seconds = 0.0

    def count(self, num_rows: int, seconds: float) -> None:
        """Count a call with ``num_rows`` rows of this request."""
        self.calls += 1
        self.rows += num_rows
        self.seconds += seconds
