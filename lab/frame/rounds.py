"""Rounds that measure everything side by side, and their results with quartiles."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsbd_ort.benchmark.bootstrap import Spread, spread

T = TypeVar("T")
PAUSE_S = 0.02  # by then the idle threads of the other engine have stopped spinning


def turn(items: Sequence[T], number: int) -> Sequence[T]:
    """Return the items of a round: in turn forwards and backwards.

    A machine that slows down slows all of them.
    """
    return items if number % 2 == 0 else items[::-1]


@dataclass(frozen=True)
class Timings:
    """Milliseconds of one call, by name; ``medians``: one of every round."""

    medians: dict[str, list[float]]

    def milliseconds(self, name: str) -> Spread:
        """Return the spread over the rounds."""
        return spread(self.medians[name])

    def ratio(self, name: str, baseline: str) -> Spread:
        """Return the spread of the ratio to ``baseline`` in the same round."""
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
    """Time every call ``calls_a_round`` times in each round; the first of a round does not count.

    The calls of a round follow each other as in a request.
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
