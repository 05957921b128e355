"""A feature draft is as invisible as any, and each of its rows comes from the right feature."""

from collections import Counter

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, decode
from tests.decoding.exact_laws import beam_sampling_law, chi_square_p_value
from tests.decoding.feature_tables import check_computed_twice, pair_of
from tests.decoding.tables import all_tokens, final_beams, mixed_table, random_table, run

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB, EOS = 5, 4
TARGET = random_table(1, VOCAB)
OTHER = random_table(2, VOCAB)
GOOD, POOR = mixed_table(TARGET, OTHER, 0.8), mixed_table(TARGET, OTHER, 0.5)

KINDS = [  # (options, the strategy without a draft that returns the same)
    ({"strategy": "speculative", "draft_beams": (1, 1, 1, 1)}, "sample"),
    ({"strategy": "tree-speculative", "draft_beams": (3, 2)}, "sample"),
    ({"num_beams": 2, "draft_beams": (2, 2, 2)}, "beam-sample"),
    ({"num_beams": 2, "draft_beams": (6, 4, 2, 2)}, "beam-sample"),
    ({"num_beams": 4, "draft_beams": (8, 4, 4)}, "beam-sample"),
    (
        {"strategy": "speculative-beam-search", "num_beams": 3, "draft_beams": (4, 4, 4)},
        "beam-search",
    ),
    ({"num_beams": 2, "replacement": True, "draft_beams": (3, 3, 3)}, None),
    ({"num_beams": 3, "memory": "single", "draft_length": 3}, None),
    ({"num_beams": 3, "min_beams": 2, "draft_length": 3}, None),
    ({"num_beams": 2, "coupling": "rejection", "draft_beams": (3, 3, 3)}, None),
    ({"strategy": "mjsd", "draft_beams": (2, 2, 2)}, None),
    (
        {
            "strategy": "speculative",
            "logit_bias": {3: -1.0},
            "repetition_penalty": 1.3,
            "draft_length": 3,
        },
        None,
    ),
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


@pytest.mark.parametrize(("options", "plain"), KINDS)
def test_a_feature_draft_is_invisible_and_reads_the_right_features(options, plain):
    num_beams = options.get("num_beams", 1)
    returned = {"num_return_sequences": num_beams} if plain else {}
    common = {"max_new_tokens": 14, "eos_token_id": EOS, **returned}
    length = {"draft_length": len(options["draft_beams"])} if "draft_beams" in options else {}
    config = DecodingConfig(**common, **length, **options)
    num_again = 0
    for seed, prompt in enumerate(PROMPTS):
        result, times = by_features(config, seed, prompt)
        num_again += times[2]
        if plain:
            without = DecodingConfig(strategy=plain, num_beams=num_beams, **common)
            expected = run(without, TARGET, None, VOCAB, seed, prompt)
            assert all_tokens(result) == all_tokens(expected)
    # accepted nodes are computed again from the target's features
    assert num_again > (40 if plain else 20)


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
