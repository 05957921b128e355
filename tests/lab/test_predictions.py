"""Predicted texts: the share of the edits, and what is saved in the seconds of calls on a clock."""

import difflib
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import FREE, EngineCosts
from lab.predictions import edited
from tests.decoding.tables import TimedTable, decoded, request_on
from tests.decoding.test_ngram_gain import curve_of

VOCAB, NUM_TOKENS = 64, 150
TEXT = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS).tolist()
STRATEGIES = {  # without a draft, with one
    "greedy": ({"strategy": "greedy"}, {"strategy": "speculative-beam-search", "num_beams": 1}),
    "sample": ({"strategy": "sample"}, {"strategy": "speculative"}),
    "search": ({"strategy": "beam-search"}, {"strategy": "speculative-beam-search"}),
}


@pytest.mark.parametrize("share", [0.0, 0.03, 0.1, 0.3])
def test_about_that_share_is_edited(share: float) -> None:
    tokens = list(range(4000))
    found = edited(tokens, share, seed=1)
    kept = difflib.SequenceMatcher(None, tokens, found, autojunk=False).get_matching_blocks()
    num_kept = len(tokens) * (1 - share * 2 / 3)  # an inserted token takes none away
    assert sum(block.size for block in kept) == pytest.approx(num_kept, rel=0.02)


def writes_text(path: tuple[int, ...]) -> np.ndarray:
    logits = np.random.default_rng(len(path)).normal(size=VOCAB)
    logits[TEXT[min(len(path), NUM_TOKENS) - 1]] += 8.0
    return logits


def answered(share_of_a_row: float, **options: Any) -> tuple[float, DecodeResult]:
    curve, clock = curve_of(share_of_a_row), [0.0]
    model = TimedTable(VOCAB, writes_text, curve, clock)
    costs = {"costs": EngineCosts(curve, FREE), "estimator": AcceptanceEstimator()}
    config = DecodingConfig(max_new_tokens=NUM_TOKENS, **options)
    request = request_on(config, (7,), clock=lambda: clock[0], **costs)
    result = decoded(request, model)
    return clock[0], result


@pytest.mark.parametrize(
    ("strategy", "share_of_a_row", "edits", "least"),
    [
        ("greedy", 0.05, 0.03, 4.0),
        ("greedy", 0.05, 0.1, 2.5),
        ("greedy", 0.05, 0.3, 1.3),
        ("sample", 0.2, 0.1, 1.5),
        ("search", 0.05, 0.03, 1.3),
        ("search", 0.2, 0.3, 0.97),
        ("search", 0.05, 1.0, 0.97),
        ("sample", 0.05, 1.0, 0.97),
    ],
)
def test_a_prediction_is_this_much_faster(
    strategy: str, share_of_a_row: float, edits: float, least: float
) -> None:
    plain, drafted = STRATEGIES[strategy]
    usual, expected = answered(share_of_a_row, **plain)
    ids = expected.sequences[0].token_ids
    drafted = {**drafted, "drafter": "ngram", "predicted_token_ids": edited(ids, edits, 1)}
    seconds, result = answered(share_of_a_row, **drafted)
    assert result.sequences[0].token_ids == ids
    assert usual / seconds >= least
