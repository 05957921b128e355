"""The engines' stand-ins for host time give the same tokens with either head."""

import itertools

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, DecodingRequest, decode, decode_iterations, result_of
from dsbd_ort.decoding.forest_runner import ForestRunner
from lab.host_time.bigram_models import DenseBigram, TopKBigram, random_pair
from lab.host_time.budget import ENGINE, NAMES, Budget


def test_the_top_k_head_gives_the_tokens_of_all_logits():
    target, draft = random_pair(300, 0.85)
    config = DecodingConfig(num_beams=2, top_k=8, max_new_tokens=12)
    dense = DenseBigram(target), DenseBigram(draft)
    with_head = TopKBigram(target, 16), TopKBigram(draft, 16)
    results = [
        decode(*pair, (1, 2, 3), config, np.random.default_rng(0)) for pair in (dense, with_head)
    ]
    sequences = [result.sequences[0] for result in results]
    assert sequences[0].token_ids == sequences[1].token_ids
    np.testing.assert_allclose(
        sequences[0].token_logprobs, sequences[1].token_logprobs, rtol=0, atol=1e-6
    )
    assert 0.0 < results[0].stats.draft_acceptance_rate < 1.0


def iterations_of(config, target, draft):
    given = {"prompt_ids": (1, 2, 3), "rng": np.random.default_rng(0), "clock": lambda: 0.0}
    return decode_iterations(DecodingRequest(config=config, **given), target, draft)


def test_the_budget_has_the_whole_time_and_leaves_functions_as_they_were():
    target, draft = (TopKBigram(each, 16) for each in random_pair(300, 0.85))
    config = DecodingConfig(strategy="dsbd", num_beams=2, top_k=8, max_new_tokens=12)
    before = ForestRunner.compute, DenseBigram.forward

    ticks = itertools.count()
    budget = Budget(clock=lambda: float(next(ticks)))
    began = next(ticks)
    with budget.measured((DenseBigram, "forward")):
        result = result_of(iterations_of(config, target, draft))
    assert sum(budget.seconds.values()) == next(ticks) - began - 2
    assert all(budget.seconds[step] > 0 for step in (*NAMES, ENGINE) if step != "policy")
    counted = Budget()
    with counted.counted((DenseBigram, "forward")):
        again = result_of(iterations_of(config, target, draft))
    assert again.sequences[0].token_ids == result.sequences[0].token_ids
    assert all(counted.calls[step] > 0 for step in NAMES if step != "policy")
    assert (ForestRunner.compute, DenseBigram.forward) == before


LIMITS = [  # (options, most calls of functions in an iteration)
    ({"strategy": "beam-sample", "num_beams": 4, "top_k": 8}, 270),
    ({"strategy": "greedy"}, 262),
    ({"strategy": "dsbd", "num_beams": 4, "top_k": 8, "width_policy": "fixed"}, 885),
]


@pytest.mark.parametrize(("options", "most"), LIMITS)
def test_an_iteration_makes_few_calls(options, most):
    """A tenth more than it takes: a layer of calls that only forward has to be worth it."""
    target, draft = (TopKBigram(each, 16) for each in random_pair(300, 0.85))
    config = DecodingConfig(**options, draft_policy="fixed", max_new_tokens=32)
    counted = Budget()
    with counted.counted((DenseBigram, "forward")):
        stats = result_of(iterations_of(config, target, draft)).stats
    num_calls = sum(counted.calls[step] for step in NAMES) / stats.num_iterations
    assert num_calls <= most
