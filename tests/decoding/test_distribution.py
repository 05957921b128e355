"""Warping: sparse equals dense, edges, refusal of broken logits."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dsbd_forward.logits import DenseLogits, TopLogits
from dsbd_ort.decoding import ModelError
from dsbd_ort.decoding.distribution import TokenDistribution
from dsbd_ort.decoding.warp import Warp
from tests.decoding.top_table import candidates_of

LOGITS = np.array([[1.0, 3.0, 2.0, -1.0, 0.0]], dtype=np.float32)


def dense(law: TokenDistribution, vocab_size: int = 5) -> np.ndarray:
    probs = np.zeros(vocab_size)
    probs[law.tokens] = np.exp(law.log_probs)
    return probs


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


EXPECTED = [  # (temperature, top_k, top_p, kept tokens)
    (1.0, 0, 1.0, [0, 1, 2, 3, 4]),
    (0.5, 0, 1.0, [0, 1, 2, 3, 4]),
    (1.0, 2, 1.0, [1, 2]),
    (1.0, 9, 1.0, [0, 1, 2, 3, 4]),
    (1.0, 0, 0.60, [1]),  # probabilities 0.64, 0.23, 0.09, 0.03, 0.01
    (1.0, 0, 0.65, [1, 2]),
    (1.0, 2, 0.70, [1]),  # top-k first: 0.73, 0.27
    (2.0, 3, 0.9, [0, 1, 2]),
    (1.0, 0, 1e-9, [1]),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "kept"), EXPECTED)
def test_warped_law(temperature, top_k, top_p, kept):
    law = Warp(temperature, top_k, top_p).distributions(DenseLogits(LOGITS))[0]
    cut = np.full(5, -np.inf)
    cut[kept] = LOGITS[0, kept] / temperature
    np.testing.assert_allclose(dense(law), softmax(cut), atol=1e-12)
    raw = np.log(softmax(LOGITS[0].astype(np.float64)))
    np.testing.assert_allclose(law.raw_log_probs, raw[law.tokens], atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e3])
def test_extreme_temperatures_stay_finite(temperature):
    law = Warp(temperature, 0, 1.0).distributions(DenseLogits(LOGITS))[0]
    assert dense(law).sum() == pytest.approx(1.0)


def test_minus_infinity_means_probability_zero():
    logits = np.array([[0.0, -np.inf, 0.0]], dtype=np.float32)
    for top_k in (0, 2):
        assert dense(Warp(1.0, top_k, 1.0).distributions(DenseLogits(logits))[0], 3).tolist() == [
            0.5,
            0.0,
            0.5,
        ]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_refused(bad):
    with pytest.raises(ModelError, match="finite"):
        Warp(1.0, 0, 1.0).distributions(DenseLogits(np.array([[0.0, bad]], dtype=np.float32)))
    with pytest.raises(ModelError, match="finite"):
        Warp(1.0, 0, 1.0).distributions(DenseLogits(np.full((1, 2), -np.inf, dtype=np.float32)))


def test_top_k_makes_no_second_dense_array():
    logits = np.random.default_rng(0).normal(size=(16, 100_000)).astype(np.float32)
    tracemalloc.start()
    laws = Warp(0.7, 20, 0.9).distributions(DenseLogits(logits))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(law.tokens.shape == (20,) for law in laws)
    assert peak < logits.nbytes / 2  # float32; one row's scratch and index are an eighth


def law_of_candidates(warp, logits, num_candidates):
    found = candidates_of(logits, num_candidates)
    return warp.distributions(found)


ORDERED = [  # (logits, top_k, tokens of the law): decreasing logit, ties by increasing id
    ([1.0, 3.0, 2.0, -1.0, 0.0], 3, [1, 2, 0]),
    ([1.0, 3.0, 2.0, -1.0, 0.0], 5, [1, 2, 0, 4, 3]),
    ([1.0, 3.0, 2.0, -1.0, 0.0], 9, [1, 2, 0, 4, 3]),
    ([0.0, 1.0, 0.0, 1.0, 0.0], 2, [1, 3]),
    ([0.0, 1.0, 0.0, 1.0, 0.0], 4, [1, 3, 0, 2]),
    ([0.0, 0.0, 0.0, 0.0, 0.0], 3, [0, 1, 2]),
    ([-np.inf, 2.0, -np.inf, -np.inf, 3.0], 3, [4, 1, 0]),
]


@pytest.mark.parametrize(("logits", "top_k", "tokens"), ORDERED)
def test_top_k_lists_tokens_in_the_order_of_a_top_k_head(logits, top_k, tokens):
    rows = np.array([logits, logits[::-1]], dtype=np.float32)
    laws = Warp(1.0, top_k, 1.0).distributions(DenseLogits(rows))
    assert laws[0].tokens.tolist() == tokens
    for law, row in zip(laws, rows, strict=True):
        assert law.tokens.tolist() == np.argsort(-row, kind="stable")[:top_k].tolist()


WARPS = [
    Warp(1.0, 20, 1.0),
    Warp(0.7, 20, 0.9),
    Warp(1.3, 7, 0.5),
    Warp(1.0, 12, 1.0, is_raw=True),
    Warp(1.0, 1, 1.0),
]


@pytest.mark.parametrize("warp", WARPS)
def test_laws_of_candidates_are_those_of_all_logits(warp):
    rng = np.random.default_rng(0)
    for logits in (rng.normal(size=(9, 500)) * 3, rng.integers(-3, 3, (9, 500))):
        logits = logits.astype(np.float32)
        from_candidates = law_of_candidates(warp, logits, 20)
        for found, expected in zip(
            from_candidates, warp.distributions(DenseLogits(logits)), strict=True
        ):
            np.testing.assert_array_equal(found.tokens, expected.tokens)
            np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)
            np.testing.assert_allclose(
                found.raw_log_probs, expected.raw_log_probs, rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["top_logits", "logsumexp"])
def test_broken_candidates_are_refused(bad, place):
    arrays = {"top_logits": np.array([[1.0, 0.0]]), "logsumexp": np.array([1.4])}
    arrays[place].flat[0] = bad
    top_logits, logsumexp = (array.astype(np.float32) for array in arrays.values())
    with pytest.raises(ModelError, match="finite"):
        Warp(1.0, 2, 1.0).distributions(TopLogits(np.array([[1, 0]]), top_logits, logsumexp))


def test_laws_of_no_candidates():
    assert not len(law_of_candidates(Warp(1.0, 2, 1.0), np.zeros((0, 5), np.float32), 3))
