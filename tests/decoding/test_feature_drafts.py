"""A feature draft is as invisible as any, and each of its rows comes from the right feature."""

from collections import Counter

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, decode
from tests.decoding.exact_laws import beam_sampling_law, chi_square_p_value
from tests.decoding.feature_tables import check_computed_twice, pair_of
from tests.decoding.tables import all_tokens, final_beams, mixed_table, random_table, run

VOCAB, EOS = 5, 4
TARGET = random_table(1, VOCAB)
OTHER = random_table(2, VOCAB)
GOOD, POOR = mixed_table(TARGET, OTHER, 0.8), mixed_table(TARGET, OTHER, 0.5)

PLAIN = {
    "dsbd": "beam-sample",
    "speculative": "sample",
    "tree-speculative": "sample",
    "speculative-beam-search": "beam-search",
}
SHAPES = [  # (strategy, num_beams, draft_beams per layer)
    ("speculative", 1, (1, 1, 1, 1)),
    ("tree-speculative", 1, (3, 2)),
    ("dsbd", 2, (2, 2, 2)),
    ("dsbd", 2, (6, 4, 2, 2)),
    ("dsbd", 4, (8, 4, 4)),
    ("speculative-beam-search", 3, (4, 4, 4)),
]
PROMPTS = [
    tuple(np.random.default_rng(seed).integers(0, 4, 1 + seed % 9).tolist()) for seed in range(40)
]


def by_features(
    config: DecodingConfig, seed: int, prompt: tuple[int, ...]
) -> tuple[DecodeResult, dict[int, int]]:
    drops = config.coupling == "rejection" or config.row.rule == "joint"  # what may come again
    target, draft = pair_of(VOCAB, TARGET, GOOD, POOR, several=drops)
    result = decode(target, draft, prompt, config, np.random.default_rng(seed))
    if drops:
        return result, Counter(Counter(draft.computed_paths).values())
    paths = [path for path in target.computed_paths if len(path) >= len(prompt)]
    assert len(set(paths)) == len(paths), "the target has computed a node twice"
    return result, check_computed_twice(draft, len(prompt))


@pytest.mark.parametrize(("strategy", "num_beams", "draft_beams"), SHAPES)
def test_a_feature_draft_is_invisible(strategy, num_beams, draft_beams):
    common = {"num_beams": num_beams, "num_return_sequences": num_beams}
    common |= {"max_new_tokens": 12, "eos_token_id": EOS}
    plain = DecodingConfig(strategy=PLAIN[strategy], **common)
    shape = {"draft_length": len(draft_beams), "draft_beams": draft_beams}
    config = DecodingConfig(strategy=strategy, **shape, **common)
    num_again = 0
    for seed, prompt in enumerate(PROMPTS):
        expected = run(plain, TARGET, None, VOCAB, seed, prompt)
        result, times = by_features(config, seed, prompt)
        assert all_tokens(result) == all_tokens(expected)
        num_again += times[2]
    assert num_again > 40  # accepted nodes are computed again from the target's features


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "dsbd", "num_beams": 2, "replacement": True, "draft_beams": 3},
        {"strategy": "dsbd", "num_beams": 3, "memory": "single"},
        {"strategy": "dsbd", "num_beams": 3, "width_policy": "threshold", "min_beams": 2},
        {"strategy": "dsbd", "num_beams": 2, "coupling": "rejection", "draft_beams": 3},
        {"strategy": "mjsd", "draft_beams": 2},
        {"strategy": "speculative", "logit_bias": {3: -1.0}, "repetition_penalty": 1.3},
    ],
)
def test_every_kind_of_request_reads_the_right_features(options):
    config = DecodingConfig(max_new_tokens=14, eos_token_id=EOS, draft_length=3, **options)
    num_again = 0
    for seed, prompt in enumerate(PROMPTS):
        num_again += by_features(config, seed, prompt)[1][2]
    assert num_again > 20


def test_a_draft_that_is_right_from_either_feature_is_always_accepted():
    config = DecodingConfig(num_beams=2, max_new_tokens=10, draft_length=4)
    for seed in range(10):
        target, draft = pair_of(VOCAB, TARGET, TARGET, TARGET)
        result = decode(target, draft, (1, 0, 1), config, np.random.default_rng(seed))
        assert result.stats.acceptance_histogram == [0, 0, 0, 0, 2]
        assert result.stats.draft_acceptance_rate == 1.0


def test_rejection_coupling_keeps_the_law():
    """The draft's distributions depend on when a node was computed; the output does not."""
    law = beam_sampling_law(random_table(7, 3, spread=1.0), (1, 2), 2, 3, 0, False)
    table = random_table(7, 3, spread=1.0)
    other = random_table(8, 3)
    config = DecodingConfig(
        num_beams=2, num_return_sequences=2, max_new_tokens=3, eos_token_id=0,
        width_policy="fixed", coupling="rejection", draft_length=2,
    )  # fmt: skip
    counts: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for seed in range(4000):
        target, draft = pair_of(
            3, table, mixed_table(table, other, 0.7), mixed_table(table, other, 0.3)
        )
        counts[final_beams(decode(target, draft, (1, 2), config, np.random.default_rng(seed)))] += 1
    assert set(counts) <= set(law)
    assert chi_square_p_value(counts, law, 4000) > 1e-4
