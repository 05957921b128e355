"""Exact ties: equal scores are ordered by beam and then by token."""

import numpy as np
import pytest

from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.joint_distribution import best_candidates
from dsbd_ort.decoding.warp import Warp
from tests.decoding.tables import LogitsOf, random_table, run

pytestmark = pytest.mark.usefixtures("both_loops")

PROMPT = (1, 0, 1)


def equal(path: tuple[int, ...]) -> np.ndarray:
    return np.zeros(300)


WIDE = random_table(6, 600)


def with_one_good_beam(path: tuple[int, ...]) -> np.ndarray:
    """Logits of which many are equal; nearly all of the best paths begin with token 7."""
    logits = np.round(WIDE(path))
    logits[7] += 10.0 if len(path) == len(PROMPT) else 0.0
    return logits


def best_paths(table: LogitsOf, num_beams: int, num_layers: int) -> list[list[int]]:
    """Return the paths of a search that looks at all tokens of every beam, best first."""
    paths: list[tuple[int, ...]] = [PROMPT]
    weights = np.zeros(1)
    for _ in range(num_layers):
        logits = np.array([table(path) for path in paths], dtype=np.float32)
        rows = [
            Warp(1.0, 600, 1.0, is_raw=True).distributions(DenseLogits(row[None]))[0]
            for row in logits
        ]
        scores = np.concatenate(
            [weight + row.log_probs for weight, row in zip(weights, rows, strict=True)]
        )
        best = np.argsort(-scores, kind="stable")[:num_beams]
        paths = [(*paths[i // 600], int(rows[i // 600].tokens[i % 600])) for i in best]
        weights = scores[best]
    return [list(path[len(PROMPT) :]) for path in paths]


@pytest.mark.parametrize("table", [with_one_good_beam, WIDE])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_wide_search_finds_the_best_of_all_tokens(table: LogitsOf, num_layers: int) -> None:
    config = DecodingConfig(
        strategy="beam-search", num_beams=150, num_return_sequences=150, max_new_tokens=num_layers
    )
    found = run(config, table, None, 600, seed=0).sequences
    assert [sequence.token_ids for sequence in found] == best_paths(table, 150, num_layers)


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
