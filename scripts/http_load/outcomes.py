"""What became of the requests of a load: how often, how fast, how many of each kind."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Outcomes:
    """Seconds by kind and status; may be shared by threads."""

    seconds_by_outcome: defaultdict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, status: str, seconds: float) -> None:
        """Note one request."""
        with self._lock:
            self.seconds_by_outcome[kind, status].append(seconds)

    def unwanted(self, wanted: dict[str, set[str]]) -> list[str]:
        """Return what came that is not among the statuses ``wanted`` of its kind."""
        return [
            f"{len(seconds)} x {kind}: {status}"
            for (kind, status), seconds in sorted(self.seconds_by_outcome.items())
            if status not in wanted[kind]
        ]

    def table(self) -> Iterator[str]:
        """Yield the lines of a table."""
        yield "| request | status | number | p50 ms | p99 ms | longest ms |"
        yield "|---" * 6 + "|"
        for (kind, status), seconds in sorted(self.seconds_by_outcome.items()):
            median, high = 1e3 * np.quantile(seconds, (0.5, 0.99))
            longest = 1e3 * max(seconds)
            number = len(seconds)
            yield f"| {kind} | {status} | {number} | {median:.1f} | {high:.1f} | {longest:.1f} |"
