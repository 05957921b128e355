"""Differences between two outputs, and the requests that are compared."""

import math

from dsbd_ort.benchmark.bench_run import CommonSettings
from dsbd_ort.benchmark.invariance import CheckedRequests, PairCount, pair_count

OUTPUT = [([5, 6], [-0.25, -1.5]), ([5, 7], [-0.25, -2.5])]
LAST_BIT = math.nextafter(-2.5, 0)
PAIRS = {  # (another output, has other tokens, has other log-probabilities)
    "the same": ([([5, 6], [-0.25, -1.5]), ([5, 7], [-0.25, -2.5])], 0, 0),
    "the last bit": ([([5, 6], [-0.25, -1.5]), ([5, 7], [-0.25, LAST_BIT])], 0, 1),
    "another token": ([([5, 6], [-0.25, -1.5]), ([5, 8], [-0.25, -2.5])], 1, 1),
    "another order": (OUTPUT[::-1], 1, 1),
    "one less": (OUTPUT[:1], 1, 1),
    "text": ([(["ab"], [-0.25, -1.5]), (["ac"], [-0.25, -2.5])], 1, 1),
}


def test_every_difference_is_counted():
    for name, (other, num_tokens, num_logprobs) in PAIRS.items():
        found = pair_count(name, [(OUTPUT, other)])
        assert found == PairCount(
            name=name,
            num_requests=1,
            num_other_tokens=num_tokens,
            num_other_logprobs=num_logprobs,
        )
    total = pair_count("all", [(OUTPUT, other) for other, *_ in PAIRS.values()])
    assert (total.num_requests, total.num_other_tokens, total.num_other_logprobs) == (6, 4, 5)


def test_mixed_requests_take_strategies_in_turn():
    requests = CheckedRequests(["a", "b"], CommonSettings(num_beams=(2, 4)), 2, 7)
    found = [
        (each.prompt, each.options["strategy"], each.options["seed"], each.options.get("num_beams"))
        for each in requests.mixed(has_draft=True)
    ]
    assert found == [
        ("a", "dsbd", 7, 2),
        ("b", "speculative", 8, None),
        ("a", "speculative-beam-search", 9, 2),
        ("b", "dsbd", 10, 2),
    ]
    strategies = [each.options["strategy"] for each in requests.mixed(has_draft=False)]
    assert strategies == ["beam-sample", "sample", "beam-search", "beam-sample"]
