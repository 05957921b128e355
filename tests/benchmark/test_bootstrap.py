"""Estimates, their intervals and spreads."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.benchmark.bootstrap import Spread, bootstrap, spread


def test_spread_is_median_and_quartiles():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0)


def test_the_same_values_give_the_same_interval():
    values = np.random.default_rng(1).normal(2.0, 0.1, 40).tolist()
    assert bootstrap(values, "median") == bootstrap(values, "median")


def test_equal_values_leave_no_doubt():
    estimate = bootstrap([1.5] * 7, "median")
    assert (estimate.value, estimate.low, estimate.high) == (1.5, 1.5, 1.5)


def test_median_is_not_moved_by_one_disturbed_pair_and_the_mean_is():
    values = [2.0] * 9 + [200.0]
    assert bootstrap(values, "median").value == 2.0
    assert bootstrap(values, "mean").value == pytest.approx(21.8)


def test_interval_of_a_mean_is_near_the_normal_one_and_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    num_trials, num_values, num_covered = 200, 40, 0
    for _ in range(num_trials):
        estimate = bootstrap(rng.normal(1.0, 0.5, num_values).tolist(), "mean")
        num_covered += estimate.low <= 1.0 <= estimate.high
        assert 0.15 < estimate.high - estimate.low < 0.50  # 2 * 1.96 * 0.5 / sqrt(40) = 0.31
    assert 0.88 <= num_covered / num_trials <= 0.99
