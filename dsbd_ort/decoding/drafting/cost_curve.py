"""Seconds of engine calls by their rows: given, or learned from the calls that requests make.

No request waits for a measurement (docs/algorithm.md 3.5). Before any call, one row is guessed to
take as long as reading every weight once, and a further row a small part of that. Of the latest
calls of each size, except the first, the first quartile is used (a disturbance only makes a call
longer). Sizes that were never called lie on a line through the others and two guessed points.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import Engine
from dsbd_forward.features import ZEROS, ParentFeatures
from dsbd_forward.forward import Forward, ForwardResult, Source
from dsbd_ort.decoding.engine_call import EngineCall
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK

Floats = NDArray[np.float64]
LEARNED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SIZES = np.array(LEARNED_ROWS, dtype=np.float64)
_KEPT_CALLS = 9  # of a size
_SOON = 3  # calls of a size each of which changes the curve at once
_GUESSED_SHARE = 0.05  # of the seconds of one row: the cost of a further row
_BYTES_PER_SECOND = 1e10  # read by a call of one row
_FIRST_ROWS = 8  # of a target call, with the first draft; then twice as many as were seen
LOOK_AHEAD = 6  # layers after the next one whose gain is estimated

CostKind = Literal["target", "draft", "source"]


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a call by its rows, (num_points,) each, increasing: linear between and beyond."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    seen: tuple[int, int] | None = None  # fewest, most rows of the calls learned from; None: given

    def up_to(self, most_rows: int, num_sharers: int = 1) -> Floats:
        """Return the seconds of calls with 0, 1, ... ``most_rows`` rows; 0 rows are no call.

        With ``num_sharers`` requests in each call, one's share: twice 3 rows in 8 ms are 3 in 4 ms.
        """
        num_rows = np.arange(most_rows + 1) * num_sharers
        inside = np.interp(num_rows, (0, *self.rows), (0.0, *self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond: Floats = np.maximum(num_rows - self.rows[-1], 0) * slope
        return (inside + beyond) / num_sharers


FREE = CostCurve((1, 2), (0.0, 0.0))  # of a draft that makes no engine call


class Costs(Protocol):
    """Costs of the calls of both engines of a pair, which may change with every call."""

    def now(self) -> EngineCosts:
        """Return the costs as they are known now; the same object until they change."""

    def observe(self, kind: CostKind, num_rows: int, seconds: float) -> None:
        """Learn from a call, all of whose rows returned logits, or from a source's tokens."""


@dataclass(frozen=True)
class EngineCosts:
    """The cost curves by rows, given; as Costs, they never change."""

    target: CostCurve
    draft: CostCurve
    source: CostCurve = FREE  # by tokens of a source that the draft reads before its first call

    def now(self) -> EngineCosts:
        return self

    def observe(self, kind: CostKind, num_rows: int, seconds: float) -> None:
        """Learn nothing: the curves are given."""


class LearnedCosts:
    """The costs of a pair, learned from the calls that its requests make; see Costs."""

    def __init__(
        self, target_bytes: int = 10**7, draft_bytes: int = 10**7, source_bytes: int = 0
    ) -> None:
        """Take the bytes of the weights of target, draft and the draft's encoder of sources."""
        guesses = {"target": target_bytes, "draft": draft_bytes, "source": source_bytes}
        self._curves = {
            kind: LearnedCurve(num_bytes / _BYTES_PER_SECOND)
            for kind, num_bytes in guesses.items()
            if num_bytes or kind != "source"
        }
        self._costs: EngineCosts | None = None

    def now(self) -> EngineCosts:
        if self._costs is None:
            target, draft = self._curves["target"], self._curves["draft"]
            source = self._curves.get("source")
            any_known = draft if draft.num_calls else target
            self._costs = EngineCosts(
                target.curve(draft.times_guessed),
                draft.curve(target.times_guessed),
                source.curve(any_known.times_guessed) if source else FREE,
            )
        return self._costs

    def observe(self, kind: CostKind, num_rows: int, seconds: float) -> None:
        """See Costs.observe; the time of a long source is scaled to the longest size."""
        if kind == "source":
            counted = min(num_rows, LEARNED_ROWS[-1])
            num_rows, seconds = counted, seconds * counted / num_rows
        if kind in self._curves and self._curves[kind].learn(num_rows, seconds):
            self._costs = None


def observe_call(
    costs: Costs, calls: Sequence[EngineCall], seconds: float, result: ForwardResult
) -> None:
    """Let costs learn from calls that were made together, and from the source that they read.

    Nothing is learned from a call that set the engine up for its size (``ForwardResult.sets_up``).
    """
    role = calls[0].role
    if (reading := result.reading) is not None:
        if role == "draft":
            costs.observe("source", reading.num_tokens, reading.own_seconds)
        seconds -= reading.seconds
    if result.sets_up:
        return
    num_rows = 0
    for call in calls:
        if call.is_prefill:
            return
        num_rows += call.num_rows
    costs.observe(role, num_rows, seconds)


class LearnedCurve:
    """Learned cost curve of an engine. guess: seconds of a row; times_guessed: real over guess."""

    def __init__(self, guess: float) -> None:
        self._guess = max(guess, 1e-6)
        self._calls: list[deque[tuple[float, int]]] = [
            deque(maxlen=_KEPT_CALLS) for _ in LEARNED_ROWS
        ]
        self._next_fit = 1
        self.num_calls = 0
        self.times_guessed = 1.0

    def learn(self, num_rows: int, seconds: float) -> bool:
        """Store a call; return whether enough were stored since to change the curve."""
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
        """Return the curve; before the first call, the guess times ``scale``."""
        guess = 1.0 + _GUESSED_SHARE * (_SIZES - 1.0)  # in calls of one row
        if not self.num_calls:
            guessed = self._guess * scale * guess
            return CostCurve(LEARNED_ROWS, tuple(guessed.tolist()), seen=(0, 0))
        again = [list(calls)[1:] for calls in self._calls if len(calls) > 1]
        counted = again or [list(calls) for calls in self._calls if calls]
        short = [sorted(calls)[(len(calls) - 1) // 4] for calls in counted]
        seconds, rows = np.array(short, dtype=np.float64).T
        weights = np.array([len(calls) for calls in counted], dtype=np.float64)
        guessed = 1.0 + _GUESSED_SHARE * (rows - 1.0)
        ordered = sorted((seconds / guessed).tolist())  # np.median imports numpy.ma: 11 ms
        one_row = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2.0
        self.times_guessed = one_row / self._guess
        # The line of least relative errors through the points and two guessed ones, nowhere below
        # the seconds per row of any point.
        far = 1.0 + 1.0 / _GUESSED_SHARE
        all_seconds = np.append(seconds, (one_row, 2.0 * one_row))
        relative = np.sqrt(np.append(weights, (1.0, 1.0))) / all_seconds
        slope, start = np.polyfit(np.append(rows, (1.0, far)), all_seconds, 1, w=relative).tolist()
        line = start + max(slope, 0.0) * np.append(rows, _SIZES)
        line = np.maximum(line, float((seconds / rows).min()))
        # Of an observed size its own calls count as often as they were seen, the line once.
        ratios = (weights * seconds / line[: len(rows)] + 1.0) / (weights + 1.0)
        called = np.searchsorted(_SIZES, rows)
        trust = np.full(len(_SIZES), 0.5)
        trust[called] += weights
        sums = trust * line[len(rows) :] * np.interp(_SIZES, _SIZES[called], ratios)
        fitted = tuple(never_falling(sums, trust).tolist())
        return CostCurve(LEARNED_ROWS, fitted, seen=(int(rows.min()), int(rows.max())))


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
    return np.array([total / weight for total, weight, size in pools for _ in range(size)])


class RequestCosts:
    """Seconds of calls, by rows, as ``refresh`` has found them last.

    target, seconds: of target calls, (room,) float64 and a list; ``draft``: of draft calls. Calls
    beyond ``most_rows`` cost as much as one of so many. most_known: rows of the largest target call
    whose cost is known well enough for a draft.
    """

    def __init__(
        self,
        costs: Costs,
        num_sharers: Callable[[], int],
        *,
        num_beams: int,
        most_rows: int,
        most_beams: int,
        has_draft_model: bool,
    ) -> None:
        self._costs, self._sharers_now = costs, num_sharers
        self.num_beams, self.most_rows, self.most_beams = num_beams, most_rows, most_beams
        self.has_draft_model = has_draft_model
        self._known: EngineCosts | None = None
        self.num_sharers = 0
        self.refresh()

    def refresh(self) -> None:
        costs, num_sharers = self._costs.now(), self._sharers_now()
        if costs is self._known and num_sharers == self.num_sharers:  # usually
            return
        self._known, self.num_sharers = costs, num_sharers
        self.row = costs.target.seconds[0]  # of a target call of one row that is not shared
        seconds = costs.target.up_to(self.most_rows, num_sharers)
        self.target = np.pad(seconds, (0, self.most_beams + 1), mode="edge")
        self.seconds: list[float] = seconds.tolist()
        draft = costs.draft if self.has_draft_model else FREE
        self.draft: list[float] = draft.up_to(self.most_rows, num_sharers).tolist()
        self._ahead: dict[int, Floats] = {}
        self.most_known, seen = self.most_rows, costs.target.seen
        self.are_learned = seen is not None
        # Drafts begin small: guessed costs of more rows may be far too low.
        if seen is not None and self.has_draft_model:
            self.most_known = max(_FIRST_ROWS, 2 * seen[1] // num_sharers)
        elif seen is not None:
            is_base_known = seen[0] <= num_sharers * self.num_beams
            self.most_known = 2 * seen[1] // num_sharers if is_base_known else 0

    def reading(self, num_unread: int, num_unread_source: int) -> float:
        """Return the seconds in which the draft model reads so much of prompt and source."""
        if self._known is None or not (num_unread or num_unread_source):
            return 0.0
        seconds = self._known.draft.up_to(PREFILL_CHUNK)
        num_whole, rest = divmod(num_unread, PREFILL_CHUNK)
        source = self._known.source.up_to(num_unread_source)[-1]
        return float(num_whole * seconds[-1] + seconds[rest] + source)

    def rows_ahead(self, width: int) -> Floats:
        """Return seconds that layers of a width add, by rows before: (room, LOOK_AHEAD + 1)."""
        if width not in self._ahead:
            last = len(self.target) - 1
            rows = np.add.outer(np.arange(last + 1), width * np.arange(LOOK_AHEAD + 1))
            self._ahead[width] = self.target[np.minimum(rows, last)] - self.target[:, None]
        return self._ahead[width]


MEASURED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_REPETITIONS = 5
_FIRST_CALLS = 1, 1, 1, 32, 32  # rows, of a draft when its pair is opened; each size warms up
_MOST_SET_UPS = 3  # calls of a size: one binds it, one records it


def learn_from_first_calls(
    costs: Costs,
    draft: Engine,
    source: Source = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Let costs learn from calls of one row and of many on empty caches.

    An engine's first calls take longer; those that set it up are repeated. Those of many rows say
    what it costs to read a prompt, which is decided upon before any other call of the draft.
    """
    for num_rows in _FIRST_CALLS:
        num_rows = min(num_rows, draft.spec.context_length or num_rows)
        for _ in range(_MOST_SET_UPS):
            seconds, sets_up = _timed_call(draft, num_rows, clock, source)
            if not sets_up:
                break
        costs.observe("draft", num_rows, seconds)
    draft.keep(np.arange(0))


def measure_costs(
    target: Engine, draft: Engine | None, clock: Callable[[], float], source: Source = None
) -> EngineCosts:
    """Measure the engines on empty caches; the rows in the caches are dropped."""
    costs = _measured_curve(target, clock, source)
    return EngineCosts(costs, _measured_curve(draft, clock, source) if draft else FREE)


def _measured_curve(model: Engine, clock: Callable[[], float], source: Source) -> CostCurve:
    """Time chains of rows, all with logits; the median of some calls, made monotone."""
    seconds = np.empty((_REPETITIONS + 1, len(MEASURED_ROWS)))
    for repetition in seconds:  # in turns, so that a disturbance does not spoil one point
        for i, num_rows in enumerate(MEASURED_ROWS):
            repetition[i], _ = _timed_call(model, num_rows, clock, source)
    model.keep(np.arange(0))
    medians = np.maximum.accumulate(np.median(seconds[1:], axis=0))  # the first warms up
    return CostCurve(MEASURED_ROWS, tuple(medians.tolist()))


def _timed_call(
    model: Engine, num_rows: int, clock: Callable[[], float], source: Source
) -> tuple[float, bool]:
    """Make a call on an empty cache; return its seconds, and whether it set the engine up."""
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
    return seconds - (result.reading.seconds if result.reading else 0.0), result.sets_up
