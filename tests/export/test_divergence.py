"""The distances by which an engine is judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsbd_export.gate.parity import divergence


def logits_of(*rows):
    return np.log(np.array(rows, np.float32))


def test_by_hand():
    wanted, found = logits_of([0.5, 0.5], [0.9, 0.1]), logits_of([0.25, 0.75], [0.9, 0.1])
    distance = divergence(found, wanted)
    first = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert distance.mean_kl == pytest.approx(first / 2)
    assert distance.max_abs_error == pytest.approx(math.log(2))
    assert distance.top1_agreement == 0.5


def test_a_constant_changes_logits_and_no_distribution():
    wanted = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32) * 20
    distance = divergence(wanted + 1, wanted)
    assert distance.max_abs_error == pytest.approx(1, abs=1e-5)
    assert distance.mean_kl < 1e-10 and distance.top1_agreement == 1


@pytest.mark.parametrize("place", ["found", "wanted"])
def test_no_number_is_no_distance(place):
    arrays = {name: np.zeros((2, 3), np.float32) for name in ("found", "wanted")}
    arrays[place][0, 0] = np.nan
    distance = divergence(**arrays)
    assert math.isnan(distance.max_abs_error) and math.isnan(distance.mean_kl)


def test_another_shape_is_infinitely_far():
    distance = divergence(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
    assert (distance.max_abs_error, distance.mean_kl) == (math.inf, math.inf)
