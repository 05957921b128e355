"""Top-p keeps the same tokens, to the last bit, whether a few of a row are sorted or all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsbd_ort.decoding.warp as warp_module
from dsbd_forward.rows import log_normalised
from dsbd_ort.decoding.warp import _cut_top_p


def sorted_whole(log_probs: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-log_probs, axis=1, kind="stable")
    probs = np.exp(np.take_along_axis(log_probs, order, axis=1))
    is_cut_sorted = np.cumsum(probs, axis=1) - probs >= top_p
    is_cut_sorted[:, 0] = False
    is_cut = np.empty_like(is_cut_sorted)
    np.put_along_axis(is_cut, order, is_cut_sorted, axis=1)
    return np.where(is_cut, -np.inf, log_probs)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.floats(0.0, 6.0),
    steps=st.sampled_from([None, 1.0, 8.0]),
    top_p=st.floats(0.01, 0.999),
    forbidden=st.floats(0.0, 1.0),
)
def test_few_or_all(
    seed: int, width: float, steps: float | None, top_p: float, forbidden: float
) -> None:
    """Rows that few tokens settle, among other rows; equal logits; tokens that cannot be drawn."""
    rng = np.random.default_rng(seed)
    scores = np.array([[width], [1.0], [0.01], [5.0]]) * rng.normal(size=(4, 1500))
    if steps:
        scores = np.round(steps * scores) / steps
    scores[:, 1:][rng.random((4, 1499)) < forbidden] = -np.inf
    log_probs = log_normalised(scores - scores.max(axis=1, keepdims=True))
    wanted = sorted_whole(log_probs, top_p)
    for numbers in ((256, 4096), (16, 64)):
        np.testing.assert_array_equal(_cut_top_p(log_probs.copy(), top_p, numbers), wanted)


@pytest.mark.parametrize("top_p", [0.5, 0.25, 0.75])
def test_a_mass_that_is_reached_exactly(top_p: float) -> None:
    log_probs = np.full((1, 20), -np.inf)
    log_probs[0, [3, 7, 11, 19]] = np.log(0.25)
    wanted = sorted_whole(log_probs, top_p)
    np.testing.assert_array_equal(_cut_top_p(log_probs, top_p, (4,)), wanted)
    assert np.isfinite(wanted).sum() == 4 * top_p


def test_the_many_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    cut = warp_module._cut_in_order

    def counted(log_probs: np.ndarray, top_p: float, order: np.ndarray) -> np.ndarray:
        shapes.append(order.shape)
        return cut(log_probs, top_p, order)

    monkeypatch.setattr(warp_module, "_cut_in_order", counted)
    scores = np.array([[5.0], [0.1]]) * np.random.default_rng(1).normal(size=(2, 3000))
    log_probs = log_normalised(scores - scores.max(axis=1, keepdims=True))
    _cut_top_p(log_probs, 0.9)
    assert shapes == [(2, 256), (1, 3000)]
