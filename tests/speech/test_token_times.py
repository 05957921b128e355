"""Positions of tokens are those of transformers' time warping, ties and one token included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from dsbd_ort.speech.words import smoothed, token_positions, warped

WARPED = [  # costs, the first position of each token
    ([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], [0, 1, 2]),
    ([[0.0, 0.0, 9.0], [9.0, 9.0, 0.0]], [0, 2]),
    ([[5.0, 5.0]], [0]),
    ([[1.0], [2.0]], [0, 0]),  # more tokens than positions
    ([[0.0, 0.0], [0.0, 0.0]], [0, 0]),  # of equal ways that which stays longest at the last token
]


@pytest.mark.parametrize(("costs", "wanted"), WARPED)
def test_the_cheapest_way(costs, wanted):
    assert warped(np.array(costs, np.float32)).tolist() == wanted


def first_positions(costs: np.ndarray) -> list[int]:
    """As transformers reads its way."""
    tokens, positions = _dynamic_time_warping(costs.astype(np.float64))
    begins = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
    return positions[begins].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_ways_are_those_of_transformers(seed):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 40), rng.integers(1, 60)
    for costs in (
        rng.standard_normal(shape),
        rng.integers(-2, 2, shape),  # many ties
        rng.standard_normal(shape) * 1e-8 - 1,  # that rounding decides
    ):
        assert warped(costs.astype(np.float32)).tolist() == first_positions(
            costs.astype(np.float32)
        )


@pytest.mark.parametrize("num_positions", [2, 4, 50])
@pytest.mark.parametrize("width", [1, 7])
def test_weights_are_smoothed_as_by_transformers(num_positions, width):
    rng = np.random.default_rng(num_positions)
    weights = rng.random((3, 9, num_positions), dtype=np.float32)
    of_torch = torch.from_numpy(weights)[None]
    deviation, mean = torch.std_mean(of_torch, dim=-2, keepdim=True, correction=0)
    wanted = _median_filter((of_torch - mean) / deviation, width).mean(dim=1)[0].numpy()
    assert np.abs(smoothed(weights, width) - wanted).max() < 1e-5


def test_a_position_that_all_weigh_alike_says_nothing():
    weights = np.random.default_rng(0).random((2, 4, 20), dtype=np.float32)
    weights[:, :, 5:12] = 0.25  # whose deviation is 0
    assert np.isfinite(smoothed(weights, 7)).all()


def test_few_tokens():
    assert token_positions(np.zeros((2, 0, 9), np.float32), 7).tolist() == [0]
    one = np.random.default_rng(1).random((2, 1, 9), dtype=np.float32)
    assert token_positions(one, 7).tolist() == [0, 0]
    several = np.random.default_rng(1).random((2, 6, 90), dtype=np.float32)
    found = token_positions(several, 7)
    assert len(found) == 7 and found[-1] == found[-2] and (np.diff(found) >= 0).all()
