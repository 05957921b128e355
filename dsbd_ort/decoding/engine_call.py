"""Engine calls that a request needs before it can go on, and the time that they take."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dsbd_forward.forward import Forward, ForwardResult, Source

Role = Literal["target", "draft"]

ENGINE_INDEX: dict[Role, int] = {"target": 0, "draft": 1}
"""The engine's row of ``Forest.slots``."""

Clock = Callable[[], float]


class Meter:
    """Counts the engine calls and rows of a request and their time, that of cache moves included.

    Attributes:
        calls: engine calls that the request took part in; ``rows``: its own rows in them.
        seconds: of the calls; a call that several requests share counts whole for each.
        waited: seconds in which the request waited for its calls, those of others included.
    """

    def __init__(self) -> None:
        self.calls = self.rows = 0
        self.seconds = self.waited = 0.0

    def count(self, num_rows: int, seconds: float) -> None:
        """Count a call with ``num_rows`` rows of this request."""
        self.calls += 1
        self.rows += num_rows
        self.seconds += seconds


@dataclass(eq=False, slots=True)
class EngineCall:
    """One forward that a request needs before it can go on; the loop never makes it.

    Attributes:
        forward_at: returns the forward, given the row of the cache of its first new one; called
            once, just before the forward is made.
    """

    role: Role
    meter: Meter  # of the request, for this engine
    num_rows: int  # rows that it appends
    forward_at: Callable[[int], Forward]
    source: Source = None
    is_prefill: bool = False  # whether it computes a part of the prompt


def forward_groups(
    calls: Sequence[EngineCall], *, joins_sources: bool = False
) -> list[list[EngineCall]]:
    """Return calls of one engine by the forward that they share, in their order.

    joins_sources: of the engine; of any other, rows of one source alone share forwards.
    """
    groups: dict[Source, list[EngineCall]] = {}
    for call in calls:
        groups.setdefault(None if joins_sources else call.source, []).append(call)
    return list(groups.values())


Result = TypeVar("Result")
EngineCalls = Generator[EngineCall, ForwardResult, Result]
"""A computation that needs engine calls, each answered by its part of the forward's result."""
