"""Distributions of tokens, and of beams and tokens: warped, cut and joined."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsbd_ort.decoding.warp as warp_module
from dsbd_forward.logits import DenseLogits, TopLogits
from dsbd_forward.rows import log_normalised
from dsbd_ort.decoding import ModelError
from dsbd_ort.decoding.distribution import TokenDistribution
from dsbd_ort.decoding.joint_distribution import STAY
from dsbd_ort.decoding.warp import Warp, _cut_top_p
from tests.decoding.tables import joint_of
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


@pytest.mark.parametrize("warp", WARPS)
def test_a_draft_s_laws_are_the_target_s(warp):
    logits = np.random.default_rng(0).normal(size=(9, 500)).astype(np.float32)
    for kind in (DenseLogits(logits), candidates_of(logits, 20)):
        found, expected = warp.within(0).distributions(kind), warp.distributions(kind)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.log_probs, theirs.log_probs)


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
def test_top_p_of_few_sorted_tokens_or_of_all(
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
def test_a_top_p_that_is_reached_exactly(top_p: float) -> None:
    log_probs = np.full((1, 20), -np.inf)
    log_probs[0, [3, 7, 11, 19]] = np.log(0.25)
    wanted = sorted_whole(log_probs, top_p)
    np.testing.assert_array_equal(_cut_top_p(log_probs, top_p, (4,)), wanted)
    assert np.isfinite(wanted).sum() == 4 * top_p


def test_top_p_does_not_sort_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_probabilities_are_weight_times_token_probability():
    joint = joint_of([7, 8], np.log([0.3, 0.1]), [([2, 5], np.array([0.25, 0.75])), None])
    assert joint.tokens.tolist() == [2, 5, STAY] and joint.parents.tolist() == [0, 0, 1]
    np.testing.assert_allclose(joint.probabilities(), [0.1875, 0.5625, 0.25])


def test_copies_count_for_draws_but_not_for_the_weight_of_a_child():
    joint = joint_of([7, 8], np.log([0.2, 0.2]), [([1], np.array([1.0])), None], [3, 1])
    np.testing.assert_allclose(joint.probabilities(), [0.75, 0.25])
    np.testing.assert_allclose(joint.log_weights, np.log([0.2, 0.2]))


def test_a_candidate_is_the_same_in_both_laws_if_node_and_token_are():
    draft = joint_of([10, 11], np.log([0.5, 0.5]), [([3, 1], np.array([0.75, 0.25])), None])
    law = [1, 2, 3], np.array([0.1, 0.2, 0.7])
    target = joint_of([11, 10], np.log([0.2, 0.8]), [None, law])
    assert draft.aligned_to(target).tolist() == [2, 1, -1, 0]
    assert target.aligned_to(draft).tolist() == [3, 1, 0]
