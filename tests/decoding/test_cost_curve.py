"""Cost curves: between, before and beyond the measured points, and how they are measured."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.decoding import TableModel
from dsbd_ort.decoding.cost_curve import MEASURED_ROWS, CostCurve, measure_costs

CURVE = CostCurve((1, 3, 5), (2.0, 4.0, 5.0))


def test_seconds_lie_on_the_lines_between_the_points_and_beyond_the_last():
    assert CURVE.up_to(6) == pytest.approx([0.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5])
    assert CURVE.up_to(1) == pytest.approx([0.0, 2.0])


def test_who_shares_a_call_pays_a_share_of_it():
    assert CURVE.up_to(3, num_sharers=2) == pytest.approx([0.0, 3.0 / 2, 4.5 / 2, 5.5 / 2])


class TimedModel(TableModel):
    """A table model whose calls take a given time on a clock of its own."""

    def __init__(self, clock: list[float], per_row: float) -> None:
        super().__init__(2, lambda path: np.zeros(2))
        self._clock = clock
        self._per_row = per_row

    def forward(self, token_ids, positions, mask, logit_rows):
        self._clock[0] += 1.0 + self._per_row * len(token_ids)
        return super().forward(token_ids, positions, mask, logit_rows)


def test_both_engines_are_measured_and_left_empty():
    clock = [0.0]
    target, draft = TimedModel(clock, 0.5), TimedModel(clock, 0.0)
    costs = measure_costs(target, draft, lambda: clock[0])
    assert costs.target.seconds == pytest.approx([1.0 + 0.5 * n for n in MEASURED_ROWS])
    assert costs.draft.seconds == pytest.approx([1.0] * len(MEASURED_ROWS))
    assert target.num_rows == draft.num_rows == 0
