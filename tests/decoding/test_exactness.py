"""The promise: speculation is invisible, and the output follows beam sampling's law."""

from collections import Counter

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig
from tests.decoding.exact_laws import beam_sampling_law, chi_square_p_value
from tests.decoding.tables import all_tokens, final_beams, mixed_table, random_table, run

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 5
TARGET = random_table(1, VOCAB)
OTHER = random_table(2, VOCAB)
DRAFTS = {"decent": mixed_table(TARGET, OTHER, 0.7), "hostile": OTHER, "itself": TARGET}

PROMPTS = [
    tuple(np.random.default_rng(seed).integers(0, VOCAB, 6 + seed % 5).tolist())
    for seed in range(40)
]

SHAPES = [  # (num_beams, draft_beams per layer)
    (1, (1, 1, 1, 1)),
    (1, (3, 2)),
    (2, (2, 2, 2)),
    (2, (6, 4, 2, 2)),
    (4, (4, 4)),
    (4, (8, 4, 4)),
]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("num_beams", "draft_beams"), SHAPES)
@pytest.mark.parametrize("warp", [{}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.3}])
def test_fixed_width_dsbd_equals_beam_sample_token_for_token(draft, num_beams, draft_beams, warp):
    common = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 11}
    common |= {"eos_token_id": 4, **warp}
    plain = DecodingConfig(strategy="beam-sample", **common)
    speculative = DecodingConfig(
        strategy="dsbd",
        width_policy="fixed",
        draft_length=len(draft_beams),
        draft_beams=draft_beams,
        **common,
    )
    for seed, prompt in enumerate(PROMPTS[:6]):
        expected = run(plain, TARGET, None, VOCAB, seed, prompt)
        result = run(speculative, TARGET, DRAFTS[draft], VOCAB, seed, prompt)
        assert all_tokens(result) == all_tokens(expected)


@pytest.mark.parametrize("draft", DRAFTS)
def test_speculative_equals_sample(draft):
    plain = DecodingConfig(strategy="sample", max_new_tokens=20, eos_token_id=4)
    speculative = DecodingConfig(strategy="speculative", max_new_tokens=20, eos_token_id=4)
    for seed, prompt in enumerate(PROMPTS):
        expected = run(plain, TARGET, None, VOCAB, seed, prompt)
        result = run(speculative, TARGET, DRAFTS[draft], VOCAB, seed, prompt)
        assert all_tokens(result) == all_tokens(expected)


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_draft_equal_to_target_is_always_accepted(num_beams):
    config = DecodingConfig(num_beams=num_beams, width_policy="fixed", max_new_tokens=10)
    for seed in range(20):
        stats = run(config, TARGET, TARGET, VOCAB, seed).stats
        assert stats.acceptance_histogram == [0, 0, 0, 0, 2]  # 10 tokens = 2 x (4 + 1)
        assert stats.draft_acceptance_rate == 1.0


REJECTION = {"strategy": "dsbd", "width_policy": "fixed", "coupling": "rejection"}
LAW_CASES = [  # (strategy options, width, steps, eos)
    ({"strategy": "sample"}, 1, 3, -1),
    ({"strategy": "speculative", "draft_length": 2}, 1, 3, 0),
    ({"strategy": "beam-sample", "num_beams": 2}, 2, 2, -1),
    ({"strategy": "beam-sample", "num_beams": 2}, 2, 3, 0),
    ({"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed", "draft_length": 2}, 2, 3, 0),
    ({"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed", "draft_length": 1}, 3, 2, -1),
    ({"strategy": "beam-sample", "num_beams": 2, "replacement": True}, 2, 3, 0),
    ({"strategy": "beam-sample", "num_beams": 2, "coupling": "rejection"}, 2, 2, 0),
    ({**REJECTION, "num_beams": 2, "draft_length": 2}, 2, 3, 0),
    ({**REJECTION, "num_beams": 2, "draft_length": 2, "replacement": True}, 2, 3, 0),
]


@pytest.mark.parametrize(("options", "width", "steps", "eos"), LAW_CASES)
def test_final_beam_sets_follow_the_exact_law(options, width, steps, eos):
    check_law(options, width, steps, eos, num_runs=4000)


@pytest.mark.slow
def test_100000_runs_follow_the_exact_law():
    options = {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed", "draft_length": 1}
    check_law(options, width=2, steps=2, eos=0, num_runs=100_000)


def check_law(options, width, steps, eos, num_runs):
    vocab_size, prompt = 3, (1, 2)
    target = random_table(7, vocab_size, spread=1.0)
    draft = mixed_table(target, random_table(8, vocab_size), 0.5)
    config = DecodingConfig(
        max_new_tokens=steps,
        num_return_sequences=width,
        eos_token_id=() if eos < 0 else eos,
        **options,
    )
    uses_draft = draft if config.row.has_draft else None
    counts = Counter(
        final_beams(run(config, target, uses_draft, vocab_size, seed, prompt))
        for seed in range(num_runs)
    )
    law = beam_sampling_law(target, prompt, width, steps, eos, config.replacement)
    assert set(counts) <= set(law)
    assert chi_square_p_value(counts, law, num_runs) > 1e-4


def test_the_law_test_can_fail():
    law = {"heads": 0.5, "tails": 0.5}
    counts = Counter({"heads": 2200, "tails": 1800})
    assert chi_square_p_value(counts, law, 4000) < 1e-4


def test_threshold_keeps_between_min_beams_and_num_beams():
    config = DecodingConfig(num_beams=4, min_beams=2, max_new_tokens=12, num_return_sequences=2)
    widths = [run(config, TARGET, DRAFTS["decent"], VOCAB, s).stats.mean_beam_width for s in range(20)]  # fmt: skip # noqa: E501
    assert all(2 <= width <= 4 for width in widths)
    assert min(widths) < 4 and max(widths) > 2


def test_fewer_positive_candidates_than_beams_give_fewer_beams():
    config = DecodingConfig(strategy="beam-sample", num_beams=4, top_k=1, max_new_tokens=5)
    result = run(config, TARGET, None, VOCAB, 0)
    assert len(result.sequences) == 1 and result.stats.mean_beam_width == 1.0
