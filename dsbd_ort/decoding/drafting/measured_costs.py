"""Costs of engines by calls that are made to measure them, on empty caches."""

import time
from collections.abc import Callable

import numpy as np

from dsbd_forward.engine import Engine
from dsbd_forward.features import ZEROS, ParentFeatures
from dsbd_forward.forward import Forward, Source
from dsbd_ort.decoding.drafting.cost_curve import FREE, CostCurve, Costs, EngineCosts

MEASURED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_REPETITIONS = 5
_FIRST_CALLS = 3  # of a draft when its pair is opened; the very first warms up


def learn_from_first_calls(
    costs: Costs,
    draft: Engine,
    source: Source = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Let costs learn from a few calls of one row of a draft, on empty caches.

    Made when a pair is opened: the first call of an engine takes several times as long as the next
    ones, and a request would charge that to its first drafts.

    source: of the calls, for drafts that read one.
    """
    for _ in range(_FIRST_CALLS):
        costs.observe("draft", 1, _timed_call(draft, 1, clock, source))
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
