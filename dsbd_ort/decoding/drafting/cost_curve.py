"""What an iteration costs: engine calls by their rows, measured or learned, and the loop itself.

Learned (docs/algorithm.md 3.5) from the calls that requests make anyway, so that no request waits
for a measurement, and of a draft from three when its pair is opened. Known before any call: one row
reads every weight once, and a further row costs a small part of that. Of the latest calls of each
size the first quartile counts (a disturbance only ever lengthens a call), the very first excepted,
which warms up. Sizes that were never called lie on a line through the others, which two guessed
points hold where all calls are of one size.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import Engine
from dsbd_forward.features import ZEROS, ParentFeatures
from dsbd_forward.forward import Forward, Source, SourceReading
from dsbd_ort.decoding.engine_call import EngineCall, Role

Floats = NDArray[np.float64]
MEASURED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_REPETITIONS = 5
_FIRST_CALLS = 3  # of a draft when its pair is opened; the very first warms up

LEARNED_ROWS = (*MEASURED_ROWS, 64, 96, 128, 192, 256)  # calls that requests share are larger
_REMEMBERED = 9  # calls of a size
_SOON = 3  # calls of a size each of which changes the curve at once
_GUESSED_SHARE = 0.05  # of the seconds of one row: what a further row costs
_BYTES_PER_SECOND = 1e10  # read by a call of one row

_GUESSED_LOOP = 2e-4  # seconds of an iteration without a draft; a layer adds these shares of it:
_GUESSED_DRAFTING, _GUESSED_SLOPE = 0.4, 0.2  # in drafting, in verifying
_LEAST_DISTURBANCE = 2e-5  # seconds
_LOOP_MEMORY = 0.98  # weight that an iteration keeps after another


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one call by its rows: linear between the measured points, and beyond the last.

    Attributes:
        rows: (num_points,) increasing.
        seconds: (num_points,) never falling.
        seen: fewest and most rows of the calls that it is learned from; None: it is known.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    seen: tuple[int, int] | None = None

    def up_to(self, most_rows: int, num_sharers: int = 1) -> Floats:
        """Return the seconds of calls with 0, 1, ... ``most_rows`` rows; 0 rows are no call.

        With ``num_sharers`` requests in each call, all alike: one's share. Twice 3 rows in 8 ms
        are 3 rows in 4 ms.
        """
        num_rows = np.arange(most_rows + 1) * num_sharers
        inside = np.interp(num_rows, (0, *self.rows), (0.0, *self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond: Floats = np.maximum(num_rows - self.rows[-1], 0) * slope
        return (inside + beyond) / num_sharers


FREE = CostCurve((1, 2), (0.0, 0.0))
"""Of a draft that makes no engine call."""


class Costs(Protocol):
    """Costs of the calls of both engines of a pair, which may change with every call."""

    def now(self) -> EngineCosts:
        """Return the costs as they are known now."""

    def observe(self, role: Role, num_rows: int, seconds: float) -> None:
        """Learn from a call, all of whose rows returned logits."""

    def observe_source(self, role: Role, num_tokens: int, seconds: float) -> None:
        """Learn from the reading of a source."""


@dataclass(frozen=True)
class EngineCosts:
    """The cost curves of both engines of a pair; as Costs, known for good.

    Attributes:
        target, draft: by the rows of a call.
        source: by the tokens of a source that the draft reads, before its first call.
    """

    target: CostCurve
    draft: CostCurve
    source: CostCurve = FREE

    def now(self) -> EngineCosts:
        """See Costs.now."""
        return self

    def observe(self, role: Role, num_rows: int, seconds: float) -> None:
        """Learn nothing: the curves are given."""

    def observe_source(self, role: Role, num_tokens: int, seconds: float) -> None:
        """Learn nothing likewise."""


class LearnedCosts:
    """The costs of a pair, learned from the calls that its requests make; see Costs."""

    def __init__(self, target_bytes: int, draft_bytes: int, source_bytes: int = 0) -> None:
        """Take the size of the weights, by which one row of each engine is guessed.

        source_bytes: of what the draft reads a source with, none for any other draft.
        """
        self._source = LearnedCurve(source_bytes / _BYTES_PER_SECOND) if source_bytes else None
        self._curves: dict[Role, LearnedCurve] = {
            "target": LearnedCurve(target_bytes / _BYTES_PER_SECOND),
            "draft": LearnedCurve(draft_bytes / _BYTES_PER_SECOND),
        }
        self._costs: EngineCosts | None = None

    def now(self) -> EngineCosts:
        """See Costs.now."""
        if self._costs is None:
            target, draft = self._curves["target"], self._curves["draft"]
            source, known = self._source, draft if draft.num_calls else target
            self._costs = EngineCosts(
                target.curve(1.0 if target.num_calls else draft.times_guessed),
                draft.curve(1.0 if draft.num_calls else target.times_guessed),
                FREE
                if source is None
                else source.curve(1.0 if source.num_calls else known.times_guessed),
            )
        return self._costs

    def observe(self, role: Role, num_rows: int, seconds: float) -> None:
        """See Costs.observe."""
        if self._curves[role].learn(num_rows, seconds):
            self._costs = None

    def observe_source(self, role: Role, num_tokens: int, seconds: float) -> None:
        """See Costs.observe_source; a long source counts as so much of one of the longest size."""
        if role == "target" or self._source is None:
            return
        counted = min(num_tokens, LEARNED_ROWS[-1])
        if self._source.learn(counted, seconds * counted / num_tokens):
            self._costs = None


def observe_call(
    costs: Costs, calls: Sequence[EngineCall], seconds: float, reading: SourceReading | None
) -> None:
    """Let costs learn from calls that were made together, and from the source that they read."""
    role = calls[0].role
    if reading is not None:
        costs.observe_source(role, reading.num_tokens, reading.own_seconds)
        seconds -= reading.seconds
    num_rows = 0
    for call in calls:
        if call.is_prefill:
            return
        num_rows += call.num_rows
    costs.observe(role, num_rows, seconds)


class LearnedCurve:
    """The cost curve of one engine, learned from its calls.

    Attributes:
        num_calls: learned from.
        times_guessed: how many times as long as guessed a row takes.
    """

    def __init__(self, guess: float) -> None:
        """Take the guessed seconds of one row."""
        self._guess = max(guess, 1e-6)
        self._calls: list[deque[tuple[float, int]]] = [
            deque(maxlen=_REMEMBERED) for _ in LEARNED_ROWS
        ]
        self._next_fit = 1
        self.num_calls = 0
        self.times_guessed = 1.0

    def learn(self, num_rows: int, seconds: float) -> bool:
        """Remember a call; return whether enough were since to change the curve."""
        if not 1 <= num_rows <= LEARNED_ROWS[-1] or not seconds > 0.0:
            return False
        calls = self._calls[bisect_left(LEARNED_ROWS, num_rows)]
        calls.append((seconds, num_rows))
        self.num_calls += 1
        if self.num_calls < self._next_fit and len(calls) > _SOON:
            return False
        self._next_fit = self.num_calls + min(self.num_calls, 32)
        return True

    def curve(self, scale: float) -> CostCurve:
        """Return the curve; before the first call the guess, times ``scale``."""
        sizes = np.array(LEARNED_ROWS, dtype=np.float64)
        if not self.num_calls:
            guessed = self._guess * scale * _guessed(sizes)
            return CostCurve(LEARNED_ROWS, tuple(guessed.tolist()), seen=(0, 0))
        rows, seconds, weights = self._quartiles()
        ordered = sorted((seconds / _guessed(rows)).tolist())  # np.median imports numpy.ma: 11 ms
        one_row = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2.0
        self.times_guessed = one_row / self._guess
        line = _line_through(rows, seconds, weights, one_row)
        # Of an observed size its own calls count as often as they were seen, the line once.
        ratios = (weights * seconds / line(rows) + 1.0) / (weights + 1.0)
        called = np.searchsorted(sizes, rows)
        values: Floats = line(sizes) * np.interp(sizes, sizes[called], ratios)
        trust = np.full(len(sizes), 0.5)
        trust[called] += weights
        seconds = never_falling(trust * values, trust)
        seen = int(rows.min()), int(rows.max())
        return CostCurve(LEARNED_ROWS, tuple(seconds.tolist()), seen)

    def _quartiles(self) -> tuple[Floats, Floats, Floats]:
        """Return (rows, seconds, weight), (num_sizes,) float64 each, of every size that was called.

        Of each the call of the first quartile. A size that was called once counts only where none
        was called again.
        """
        again = [list(calls)[1:] for calls in self._calls if len(calls) > 1]
        counted = again or [list(calls) for calls in self._calls if calls]
        short = [sorted(calls)[(len(calls) - 1) // 4] for calls in counted]
        seconds, rows = np.array(short, dtype=np.float64).T
        return rows, seconds, np.array([len(calls) for calls in counted], dtype=np.float64)


def _guessed(rows: Floats) -> Floats:
    """Return the guessed seconds of calls, in those of one row."""
    guessed: Floats = 1.0 + _GUESSED_SHARE * (rows - 1.0)
    return guessed


def _line_through(
    rows: Floats, seconds: Floats, weights: Floats, one_row: float
) -> Callable[[Floats], Floats]:
    """Return the line of least relative errors through the points and two guessed ones.

    Nowhere below the seconds per row of any point.
    """
    guessed_rows = np.array([1.0, 1.0 + 1.0 / _GUESSED_SHARE])
    all_rows = np.concatenate([rows, guessed_rows])
    all_seconds = np.concatenate([seconds, one_row * _guessed(guessed_rows)])
    relative = np.sqrt(np.concatenate([weights, [1.0, 1.0]])) / all_seconds
    slope, start = np.polyfit(all_rows, all_seconds, 1, w=relative).tolist()
    least = float((seconds / rows).min())

    def line(sizes: Floats) -> Floats:
        seconds: Floats = np.maximum(start + max(slope, 0.0) * sizes, least)
        return seconds

    return line


def never_falling(sums: Floats, weights: Floats) -> Floats:
    """Return the means sums / weights, pooled over neighbours until none is below the one before.

    Isotonic regression (pool adjacent violators): [1/2, 3/4, 1/4] becomes [1/2, 4/8, 4/8].
    """
    pools: list[tuple[float, float, int]] = []
    for pool in zip(sums.tolist(), weights.tolist(), [1] * len(weights), strict=True):
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    return np.repeat([pool[0] / pool[1] for pool in pools], [pool[2] for pool in pools])


class LoopCost:
    """The seconds of the loop itself, outside engine calls: of an iteration, and of a draft layer.

    The latest iterations count most; a disturbance as four times what was expected. Drafting is
    timed by itself. What verifying and selecting add for a drafted layer is the slope of a line
    through the rest: where every draft has one length it stays in proportion to what was guessed.

    Attributes:
        iteration: seconds of one without a draft.
        layer: seconds that each drafted layer adds.
    """

    def __init__(self) -> None:
        self.iteration = _GUESSED_LOOP
        self.layer = _GUESSED_LOOP * (_GUESSED_DRAFTING + _GUESSED_SLOPE)
        self._drafting = 0.0
        # Sums over iterations, the latest counting most.
        self._weight = self._layers = self._squares = self._rest = self._products = 0.0

    def learn(self, num_layers: int, drafting: float, rest: float) -> None:
        """Count an iteration: the seconds of drafting so many layers, and all others."""
        drafting, rest = max(drafting, 0.0), max(rest, 0.0)  # differences of clock readings
        most = 4.0 * (self.iteration + num_layers * self.layer) + _LEAST_DISTURBANCE
        if drafting + rest > most:
            share = most / (drafting + rest)
            drafting, rest = share * drafting, share * rest
        self._drafting = _LOOP_MEMORY * self._drafting + drafting
        self._weight = _LOOP_MEMORY * self._weight + 1.0
        self._layers = layers = _LOOP_MEMORY * self._layers + num_layers
        self._squares = _LOOP_MEMORY * self._squares + num_layers**2
        self._rest = _LOOP_MEMORY * self._rest + rest
        self._products = _LOOP_MEMORY * self._products + num_layers * rest
        level = self._rest / (self._weight + _GUESSED_SLOPE * layers)
        self.layer = self._drafting / layers if layers else _GUESSED_DRAFTING * level
        # As if no layer and two had been seen twice each, at the level of what was seen.
        weight, squares = self._weight + 4.0, self._squares + 8.0
        total = self._rest + level * (4.0 + 4.0 * _GUESSED_SLOPE)
        products = self._products + level * (4.0 + 8.0 * _GUESSED_SLOPE)
        layers += 4.0
        slope = max((weight * products - layers * total) / (weight * squares - layers**2), 0.0)
        self.iteration = (total - slope * layers) / weight
        self.layer += slope


def measure_costs(
    target: Engine, draft: Engine | None, clock: Callable[[], float], source: Source = None
) -> EngineCosts:
    """Measure the engines on empty caches; what the caches hold is dropped.

    source: of the calls, for engines that read one.
    """
    costs = _measured_curve(target, clock, source)
    return EngineCosts(costs, _measured_curve(draft, clock, source) if draft else FREE)


def learn_from_first_calls(
    costs: Costs,
    draft: Engine,
    source: Source = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Let costs learn what a call of a draft takes from a few of one row, on empty caches.

    Made when a pair is opened: the first call of an engine is several times as long as the next
    ones, and a size in bytes says little of a draft that looks up most of its weights. A request
    would have to charge both to its first drafts, which then looked too dear to be made.

    source: of the calls, for drafts that read one.
    """
    for _ in range(_FIRST_CALLS):
        costs.observe("draft", 1, _timed_call(draft, 1, clock, source))
    draft.keep(np.arange(0))


def _measured_curve(model: Engine, clock: Callable[[], float], source: Source) -> CostCurve:
    """Time chains of rows, all with logits; the median of some calls, made monotone."""
    seconds = np.empty((_REPETITIONS + 1, len(MEASURED_ROWS)))
    for repetition in seconds:  # in turns, so that a disturbance does not spoil one point
        for i, num_rows in enumerate(MEASURED_ROWS):
            repetition[i] = _timed_call(model, num_rows, clock, source)
    model.keep(np.arange(0))
    medians = np.maximum.accumulate(np.median(seconds[1:], axis=0))  # the first warms up
    return CostCurve(MEASURED_ROWS, tuple(medians.tolist()))


def _timed_call(model: Engine, num_rows: int, clock: Callable[[], float], source: Source) -> float:
    """Return the seconds of a call with a chain of rows on an empty cache, its source's aside."""
    model.keep(np.arange(0))
    rows = np.arange(num_rows)
    began = clock()
    tokens, mask = np.zeros(num_rows, np.int64), np.tri(num_rows, dtype=np.bool_)
    parents = None
    if model.spec.reads_features:
        parents = ParentFeatures((), np.full(num_rows, ZEROS), rows)
    result = model.forward(
        Forward(tokens, rows, mask, rows, parent_features=parents, source=source)
    )
    seconds = clock() - began
    return seconds - result.reading.seconds if result.reading else seconds
