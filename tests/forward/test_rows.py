"""Sums over rows: those of each row alone, to the last bit, independent of other rows."""

import numpy as np
import pytest

from dsbd_forward.rows import added_up, largest_columns, largest_logits, log_normalised, row_sums
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedAfter
from dsbd_ort.decoding.logits_processing.constraint import TokenLists

SIZES = (1, 2, 5, 17, 100, 127, 128, 129, 300, 1000, 4099, 9001)


@pytest.mark.parametrize("vocab_size", [2, 17, 4099, 9001, 70_000])
def test_a_normalizer_is_that_of_its_row_alone(vocab_size: int) -> None:
    logits = np.random.default_rng(0).normal(size=(11, vocab_size)).astype(np.float32) * 4
    together = added_up(logits)
    for rows in ([0], [3, 1], [10, 9, 8, 7, 6, 5, 4]):
        np.testing.assert_array_equal(added_up(logits[rows]), together[rows])
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(together[:, 0], exact, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_zeros_after_the_terms_of_a_row_change_no_bit(size: int) -> None:
    rng = np.random.default_rng(size)
    terms = np.exp(rng.normal(size=(3, size)) * 5)
    sums = row_sums(terms)
    np.testing.assert_allclose(sums[:, 0], terms.sum(axis=1), rtol=1e-14)
    for num_more in (1, 7, 128, 1000):
        wider = np.concatenate([terms, np.zeros((3, num_more))], axis=1)
        np.testing.assert_array_equal(row_sums(wider), sums)
        np.testing.assert_array_equal(row_sums(wider[1:2]), sums[1:2])
        listed = np.log(wider, where=wider > 0, out=np.full(wider.shape, -np.inf))
        np.testing.assert_array_equal(
            log_normalised(listed)[:, :size], log_normalised(listed[:, :size])
        )


def test_the_largest_logits_are_in_the_order_of_a_top_k_head() -> None:
    logits = np.array([[1, 3, 3, 2, -np.inf], [0, 0, 0, 0, 0]], np.float32)
    tokens, found = largest_logits(logits, 3)
    assert tokens.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert found.dtype == np.float64 and found.tolist() == [[3, 3, 2], [0, 0, 0]]


def wide_rows(kind: str) -> np.ndarray:
    """Rows of a large vocabulary, as processors leave them."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(4, 9001))
    if kind == "few differ":
        scores = np.round(scores)
    elif kind == "float32":
        scores = scores.astype(np.float32)
    elif kind == "the end allowed":
        scores[:, :8990] = -np.inf
    elif kind == "one allowed":
        scores[[0, 2], :8999] = scores[[0, 2], 9000:] = -np.inf
    elif kind == "all forbidden":
        scores[1] = -np.inf
    elif kind == "growing":
        scores = np.sort(scores, axis=1)
    return scores


KINDS = ("any", "few differ", "float32", "the end allowed", "one allowed", "all forbidden")


@pytest.mark.parametrize("number", [1, 7, 10, 256, 257, 9000])
@pytest.mark.parametrize("kind", [*KINDS, "growing"])
def test_the_largest_columns_of_wide_rows(kind: str, number: int) -> None:
    scores = wide_rows(kind)
    wanted = np.sort((-scores).argsort(axis=1, kind="stable")[:, :number], axis=1)
    np.testing.assert_array_equal(largest_columns(scores, number), wanted)


def test_listed_tokens_are_by_id_whatever_the_other_rows_are() -> None:
    """Those that end a sequence too: equal scores go by place."""
    lists = TokenLists(np.array([7, 2, 9, 5]), np.array([3, 1]))
    allowed = AllowedAfter(lists, np.array([True, False]), np.array([4]))
    table = allowed.listed()
    assert table is not None and table.tolist() == [[2, 4, 7, 9], [5, -1, -1, -1]]
    alone = allowed.part(np.array([1])).listed()
    assert alone is not None and alone[0, 0] == 5
    rows, tokens = allowed.tokens_by_row(10)
    assert (rows.tolist(), tokens.tolist()) == ([0, 0, 0, 0, 1], [2, 4, 7, 9, 5])
