"""Exact ties: equal scores have one order, by beam and then by token, whatever else is drafted."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.joint_distribution import best_candidates
from tests.decoding.tables import LogitsOf, all_tokens, random_table, run

SMOOTH = random_table(5, 300)


def equal(path: tuple[int, ...]) -> np.ndarray:
    return np.zeros(300)


def rounded(path: tuple[int, ...]) -> np.ndarray:
    return np.round(SMOOTH(path))


@pytest.mark.parametrize("table", [equal, rounded])
@pytest.mark.parametrize("num_beams", [1, 3, 8])
def test_a_search_among_ties_does_not_depend_on_the_draft(table: LogitsOf, num_beams: int) -> None:
    common = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 4}
    plain = DecodingConfig(strategy="beam-search", **common)
    expected = all_tokens(run(plain, table, None, 300, seed=0))
    if table is equal:
        assert expected[0][0] == [0, 0, 0, 0]
    for draft_beams in (num_beams, num_beams + 1, 2 * num_beams, 40):
        for draft in (table, SMOOTH):
            config = DecodingConfig(
                strategy="speculative-beam-search",
                draft_length=3,
                draft_beams=draft_beams,
                **common,
            )
            assert all_tokens(run(config, table, draft, 300, seed=0)) == expected


@pytest.mark.parametrize("num_scores", [5, 256, 257, 3000])
@pytest.mark.parametrize("num_values", [1, 2, 7])
def test_the_best_are_the_first_of_one_order(num_scores: int, num_values: int) -> None:
    rng = np.random.default_rng(num_scores + num_values)
    scores = rng.integers(num_values, size=num_scores).astype(np.float64)
    scores[rng.random(num_scores) < 0.3] = -np.inf
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > -np.inf]
    for num_wanted in (0, 1, 2, 4, num_scores - 1, num_scores, num_scores + 1):
        assert best_candidates(scores, num_wanted).tolist() == order[:num_wanted].tolist()
