"""N-grams under "throughput": cheap where they never come true, quick where text is copied.

In the seconds of calls on a clock: nothing is timed.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import FREE, CostCurve, Costs, EngineCosts, LearnedCosts
from tests.decoding.tables import LogitsOf, TimedTable, all_tokens, decoded, request_on

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB, NUM_TOKENS = 16, 64
PAIRS = [  # (strategy that drafts, the one with the same output, num_beams)
    ("speculative", "sample", 1),
    ("speculative-beam-search", "greedy", 1),
    ("dsbd", "beam-sample", 2),
    ("dsbd", "beam-sample", 4),
    ("speculative-beam-search", "beam-search", 4),
]


def certain(token: int) -> np.ndarray:
    return np.where(np.arange(VOCAB) == token, 0.0, -30.0)


def never_again(path: tuple[int, ...]) -> np.ndarray:
    """No token follows another twice: whatever followed before is wrong."""
    followed = {b for a, b in itertools.pairwise(path) if a == path[-1]}
    rest = [token for token in range(VOCAB) if token not in followed]
    return certain(rest[np.random.default_rng([len(path), path[-1]]).integers(len(rest))])


def in_turn(path: tuple[int, ...]) -> np.ndarray:
    """The tokens of the vocabulary in turn, again and again."""
    return certain((path[-1] + 1) % VOCAB)


def prompt_of(table: LogitsOf) -> tuple[int, ...]:
    path = [0]
    while len(path) < 100:
        path.append(int(table(tuple(path)).argmax()))
    return tuple(path)


def answered(
    table: LogitsOf, curve: CostCurve, costs: Costs, **options: Any
) -> tuple[float, DecodeResult]:
    """Return the seconds of one answer, and the answer."""
    prompt, clock = prompt_of(table), [0.0]
    model = TimedTable(VOCAB, table, curve, clock)
    model.untimed_rows = len(prompt) - 1
    config = DecodingConfig(max_new_tokens=NUM_TOKENS, **options)
    more = {"clock": lambda: clock[0], "costs": costs, "estimator": AcceptanceEstimator()}
    result = decoded(request_on(config, prompt, **more), model)
    return clock[0], result


def ratio(
    table: LogitsOf, curve: CostCurve, costs: Costs, drafted: str, plain: str, num_beams: int
) -> float:
    """Return the time of the first answer of a process with n-grams, relative to that without."""
    width = {"num_beams": num_beams} if num_beams > 1 else {}
    usual, expected = answered(table, curve, costs, strategy=plain, **width)
    ngrams = {"drafter": "ngram", "draft_policy": "throughput"}
    if drafted == "speculative-beam-search":
        width = {"num_beams": num_beams}
    seconds, result = answered(table, curve, costs, strategy=drafted, **ngrams, **width)
    assert all_tokens(result) == all_tokens(expected)
    return seconds / usual


def curve_of(share: float) -> CostCurve:
    """Return the cost of calls whose further rows take this share of the first."""
    return CostCurve((1, 64), (2e-2, 2e-2 * (1 + 63 * share)))


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2, 0.4, 1.0])
@pytest.mark.parametrize(("drafted", "plain", "num_beams"), PAIRS)
def test_ngrams_that_never_come_true_cost_at_most_3_percent_of_one_answer(
    drafted: str, plain: str, num_beams: int, share: float
) -> None:
    curve = curve_of(share)
    known = ratio(never_again, curve, EngineCosts(curve, FREE), drafted, plain, num_beams)
    assert known <= 1.03


@pytest.mark.parametrize("share", [0.02, 0.2, 0.4, 1.0])
@pytest.mark.parametrize(("drafted", "plain", "num_beams"), PAIRS)
def test_nor_while_the_costs_of_calls_are_being_learned(
    drafted: str, plain: str, num_beams: int, share: float
) -> None:
    """A row is guessed to take a share of 0.05: here one call more than expected is wasted."""
    costs = LearnedCosts(target_bytes=2 * 10**8, draft_bytes=0)
    assert ratio(never_again, curve_of(share), costs, drafted, plain, num_beams) <= 1.04


@pytest.mark.parametrize(("share", "most"), [(0.05, 0.3), (0.2, 0.5), (0.4, 0.7)])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_copied_is_drafted_from_the_first_answer_on(
    share: float, most: float, is_known: bool
) -> None:
    curve = curve_of(share)
    costs = EngineCosts(curve, FREE) if is_known else LearnedCosts(2 * 10**8, 0)
    assert ratio(in_turn, curve, costs, "speculative", "sample", 1) < most
