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

    calls: engine calls that the request took part in; ``rows``: its own rows in them.
    seconds: of the calls; a call that several requests share counts whole for each.
    engine_s: of these in the engine alone, without what the host does for a call.
    waited: seconds in which the request waited for its calls, those of others included.
    """

    def __init__(self) -> None:
        self.calls = self.rows = 0
        self.seconds = self.engine_s = self.waited = 0.0

    def count(self, num_rows: int, seconds: float, result: ForwardResult) -> None:
        self.calls += 1
        self.rows += num_rows
        self.seconds += seconds
        self.engine_s += result.engine_s(seconds)


@dataclass(eq=False, slots=True)
class EngineCall:
    """One forward that a request needs before it can go on; the loop never makes it."""

    role: Role
    meter: Meter  # of the request, for this engine
    num_rows: int  # rows that it appends
    forward_at: Callable[[int], Forward]  # by its first cache row; called once, when made
    source: Source = None
    is_prefill: bool = False  # whether it computes a part of the prompt


def forward_groups(
    calls: Sequence[EngineCall], *, joins_sources: bool = False
) -> list[list[EngineCall]]:
    """Return calls by the forward that they share: one for each source, unless the engine joins."""
    groups: dict[Source, list[EngineCall]] = {}
    for call in calls:
        groups.setdefault(None if joins_sources else call.source, []).append(call)
    return list(groups.values())


Result = TypeVar("Result")
EngineCalls = Generator[EngineCall, ForwardResult, Result]
"""A computation that needs engine calls, each answered by its part of the forward's result."""
