"""Rounds in which everything is measured alternately, and results with quartiles."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsbd_ort.benchmark.bootstrap import Spread, spread

T = TypeVar("T")
PAUSE_S = 0.02  # after this the idle threads of the other engine have stopped spinning


def turn(items: Sequence[T], number: int) -> Sequence[T]:
    """Return the items of a round, forwards or backwards in turn.

    If the machine slows down, this affects all items equally.
    """
    return items if number % 2 == 0 else items[::-1]


@dataclass(frozen=True)
class Timings:
    """Milliseconds of calls by name; ``medians``: the median of each round."""

    medians: dict[str, list[float]]

    def milliseconds(self, name: str) -> Spread:
        """Return the spread over the rounds."""
        return spread(self.medians[name])

    def ratio(self, name: str, baseline: str) -> Spread:
        """Return the spread of the ratios to ``baseline`` in the same rounds."""
        pairs = zip(self.medians[name], self.medians[baseline], strict=True)
        return spread([mine / theirs for mine, theirs in pairs])


def time_in_rounds(
    calls: Mapping[str, Callable[[], None]],
    *,
    num_rounds: int,
    calls_a_round: int,
    pause_s: float = PAUSE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time every call ``calls_a_round`` times in each round, after one call that is not timed.

    The calls of a round follow each other without a pause, as in a request.
    """
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(num_rounds):
        for name in turn(list(calls), number):
            time.sleep(pause_s)
            calls[name]()
            seconds = []
            for _ in range(calls_a_round):
                began = clock()
                calls[name]()
                seconds.append(clock() - began)
            medians[name].append(1e3 * statistics.median(seconds))
    return Timings(medians)
