"""What an engine call costs: seconds as a function of its rows, measured once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.step_model import StepModel

MEASURED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_REPETITIONS = 5


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one call by its rows: linear between the measured points, and beyond the last.

    Attributes:
        rows: (num_points,) increasing.
        seconds: (num_points,) never falling.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def up_to(self, most_rows: int, num_sharers: int = 1) -> NDArray[np.float64]:
        """Return the seconds of calls with 0, 1, ... ``most_rows`` rows; 0 rows are no call.

        With ``num_sharers`` requests in each call, all alike: one's share. Twice 3 rows in 8 ms
        are 3 rows in 4 ms.
        """
        num_rows = np.arange(most_rows + 1) * num_sharers
        inside = np.interp(num_rows, (0, *self.rows), (0.0, *self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond: NDArray[np.float64] = np.maximum(num_rows - self.rows[-1], 0) * slope
        return (inside + beyond) / num_sharers


@dataclass(frozen=True)
class EngineCosts:
    """The cost curves of both engines of a pair."""

    target: CostCurve
    draft: CostCurve


def measure_costs(target: StepModel, draft: StepModel, clock: Callable[[], float]) -> EngineCosts:
    """Measure both engines on empty caches; what the caches hold is dropped."""
    return EngineCosts(_measured_curve(target, clock), _measured_curve(draft, clock))


def _measured_curve(model: StepModel, clock: Callable[[], float]) -> CostCurve:
    """Time chains of rows, all with logits; the median of some calls, made monotone."""
    seconds = np.empty((_REPETITIONS + 1, len(MEASURED_ROWS)))
    for repetition in seconds:  # in turns, so that a disturbance does not spoil one point
        for i, num_rows in enumerate(MEASURED_ROWS):
            model.keep(np.arange(0))
            rows = np.arange(num_rows)
            began = clock()
            tokens, mask = np.zeros(num_rows, np.int64), np.tri(num_rows, dtype=np.bool_)
            model.forward(tokens, rows, mask, rows)
            repetition[i] = clock() - began
    model.keep(np.arange(0))
    medians = np.maximum.accumulate(np.median(seconds[1:], axis=0))  # the first warms up
    return CostCurve(MEASURED_ROWS, tuple(medians.tolist()))
