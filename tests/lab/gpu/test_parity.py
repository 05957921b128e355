"""Comparison with the CPU: distances of distributions, and the gaps of near-ties."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.distribution import TokenDistribution
from dsbd_ort.decoding.warp import Warp
from dsbd_runtime.loading import load_causal_lm
from lab.gpu.near_ties import distributions_along, gap_of, total_variation, trace_of, variations
from lab.gpu.parity import compare

PROMPT = [104, 105, 33]
EVERYTHING = Warp(temperature=1.0, top_k=0, top_p=1.0)


def distribution(probs_by_token):
    log_probs = np.log(list(probs_by_token.values()))
    return TokenDistribution(np.array(list(probs_by_token)), log_probs, log_probs)


DISTANCES = [  # distribution, other, total variation
    ({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}, 0.0),
    ({1: 0.75, 2: 0.25}, {2: 0.5, 1: 0.5}, 0.25),
    ({1: 1.0}, {2: 1.0}, 1.0),
    ({1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.125}, 0.125),  # the rest has 0.25 and 0.375
]


@pytest.mark.parametrize(("one", "other", "distance"), DISTANCES)
def test_total_variation(one, other, distance):
    assert total_variation(distribution(one), distribution(other)) == pytest.approx(distance)


def test_distributions_do_not_depend_on_the_sizes_of_the_calls(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target") as model:
        path = list(range(40, 60))
        in_calls = distributions_along(model, path, EVERYTHING)
        in_one = distributions_along(model, path, EVERYTHING, sizes=(20,))
    assert len(in_calls) == 20
    assert variations(in_calls, in_one).max() < 1e-6


def config(width, strategy="beam-sample"):
    return DecodingConfig(
        strategy=strategy, num_beams=width, num_return_sequences=width, top_k=0, max_new_tokens=5
    )


def test_the_gap_of_the_next_best_candidate_is_what_its_draw_missed_by(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target") as model:
        narrow, wide = (trace_of(model, PROMPT, config(width), 7) for width in (1, 2))
        kept, missed = sorted(wide.layers[0], key=lambda beam: beam not in narrow.layers[0])
        assert narrow.best[:1] == kept
        missed_by = gap_of(model, PROMPT, config(1), 7, narrow, missed * 5)
        third = next((t,) for t in range(256) if (t,) not in wide.layers[0])
        third_by = gap_of(model, PROMPT, config(1), 7, narrow, third * 5)
    assert 0 < missed_by < third_by


def test_a_final_beam_that_is_not_the_best_differs_by_rank_alone(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target") as model:
        trace = trace_of(model, PROMPT, config(3), 7)
        second = sorted(trace.scores, key=trace.scores.__getitem__)[-2]
        gap = gap_of(model, PROMPT, config(3), 7, trace, second)
    assert gap == trace.scores[trace.best] - trace.scores[second] > 0


def test_a_candidate_beyond_top_k_is_infinitely_far(tiny_bundle):
    few = DecodingConfig(strategy="beam-sample", num_beams=1, top_k=2, max_new_tokens=3)
    with load_causal_lm(tiny_bundle, "target") as model:
        trace = trace_of(model, PROMPT, few, 7)
        known = distributions_along(model, PROMPT, Warp(1.0, 2, 1.0))[-1].tokens
        other = next(token for token in range(256) if token not in known)
        assert gap_of(model, PROMPT, few, 7, trace, (other,) * 3) == np.inf


def test_a_provider_that_is_the_reference_agrees_with_it(tiny_bundle):
    parity = compare(tiny_bundle, "cpu", ["def f(x):"], 6)
    assert (parity.num_identical, parity.num_compared, parity.gaps) == (6, 6, [])
    assert parity.max_variation == 0 and parity.is_within_limits
    assert parity.num_distributions == len("def f(x):") + 6
