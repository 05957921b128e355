"""Properties of every strategy: log-probabilities add up, statistics agree, edges work."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from tests.decoding.tables import all_tokens, mixed_table, random_table, run

VOCAB = 6
TARGET = random_table(41, VOCAB)
DRAFT = mixed_table(TARGET, random_table(42, VOCAB), 0.7)
PROMPT = (1, 0, 1)

VARIANTS = [
    *({"strategy": name} for name in STRATEGIES),
    {"strategy": "dsbd", "width_policy": "fixed"},
    {"strategy": "dsbd", "memory": "single"},
    {"strategy": "dsbd", "coupling": "rejection"},
    {"strategy": "dsbd", "coupling": "rejection", "width_policy": "fixed", "replacement": True},
    {"strategy": "dsbd", "replacement": True},
    {"strategy": "speculative", "coupling": "rejection"},
    {"strategy": "tree-speculative", "coupling": "rejection"},
    {"strategy": "beam-sample", "coupling": "rejection"},
    {
        "strategy": "dsbd",
        "width_policy": "threshold",
        "draft_length": 3,
        "draft_beams": (8, 4, 2),
    },
    {"strategy": "mjsd", "temperature": 0.0},
]
VARIANT_NAMES = ["-".join(str(value) for value in variant.values()) for variant in VARIANTS]

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_NAMES)


def outcome(seed, target=TARGET, draft=DRAFT, vocab_size=VOCAB, **options):
    config = DecodingConfig(**({"max_new_tokens": 12, "eos_token_id": 5} | options))
    uses_draft = draft if config.row.has_draft else None
    return run(config, target, uses_draft, vocab_size, seed, PROMPT)


def teacher_forced(target, tokens):
    logprobs, path = [], PROMPT
    for token in tokens:
        logits = np.asarray(target(path), dtype=np.float64)
        logits = logits - logits.max()
        logprobs.append(logits[token] - np.log(np.exp(logits).sum()))
        path = (*path, token)
    return logprobs


@every_variant
def test_log_probabilities_add_up_to_a_teacher_forced_pass(variant):
    for seed in range(10):
        for sequence in outcome(seed, **variant).sequences:
            expected = teacher_forced(TARGET, sequence.token_ids)
            assert sequence.token_logprobs == pytest.approx(expected, abs=1e-4)
            assert sequence.logprob == pytest.approx(sum(sequence.token_logprobs))


@every_variant
def test_statistics_obey_their_identities(variant):
    for seed in range(10):
        stats = outcome(seed, **variant).stats
        histogram = stats.acceptance_histogram
        assert sum(histogram) == stats.num_iterations
        assert sum(j * n for j, n in enumerate(histogram)) == stats.num_accepted_layers
        steps, accepted = stats.num_iterations, stats.num_accepted_layers
        assert stats.mean_acceptance_length == pytest.approx(1 + accepted / steps)
        if stats.num_draft_tokens:
            rate = stats.num_accepted_tokens / stats.num_draft_tokens
            assert stats.draft_acceptance_rate == rate <= 1.0
        assert stats.num_accepted_layers <= stats.num_accepted_tokens or stats.num_draft_layers == 0
        assert stats.num_draft_layers <= stats.num_draft_tokens
        assert (stats.draft_calls > 0) == (stats.draft_rows > 0)


@every_variant
def test_ends_are_ends(variant):
    for seed in range(10):
        for sequence in outcome(seed, **variant).sequences:
            assert 5 not in sequence.token_ids[:-1]
            has_ended = sequence.token_ids[-1] == 5
            assert sequence.finish_reason == ("eos" if has_ended else "length")
            assert has_ended or len(sequence.token_ids) == 12


def only_token(path):
    logits = np.full(VOCAB, -np.inf)
    logits[(sum(path) + len(path)) % VOCAB] = 0.0
    return logits


EDGES = {  # name: (target, draft, vocabulary, options)
    "a single token possible": (only_token, only_token, VOCAB, {}),
    "a single token possible, any draft": (only_token, DRAFT, VOCAB, {}),
    "two tokens": (random_table(1, 2), random_table(2, 2), 2, {"eos_token_id": 1}),
    "no end": (TARGET, DRAFT, VOCAB, {"eos_token_id": None}),
    "one new token": (TARGET, DRAFT, VOCAB, {"max_new_tokens": 1}),
}
SAMPLING_EDGES = {
    "cold": {"temperature": 1e-3},
    "hot": {"temperature": 1e3},
    "tiny top_p": {"top_p": 1e-9},
    "top_k 1": {"top_k": 1},
    "top_k over the vocabulary": {"top_k": 1000},
}


@every_variant
@pytest.mark.parametrize("edge", EDGES)
def test_edges(variant, edge):
    target, draft, vocab_size, options = EDGES[edge]
    for seed in range(3):
        result = outcome(seed, target, draft, vocab_size, **(variant | options))
        assert result.sequences and np.isfinite(result.sequences[0].logprob)


@pytest.mark.parametrize("edge", SAMPLING_EDGES)
@every_variant
def test_edges_of_warping(variant, edge):
    if STRATEGIES[variant["strategy"]].rule == "search":
        pytest.skip("a search does not warp")
    for seed in range(3):
        result = outcome(seed, **(variant | SAMPLING_EDGES[edge]))
        assert np.isfinite(result.sequences[0].logprob)


@pytest.mark.parametrize("draft_beams", [2, 4])
def test_tree_speculative_equals_sample(draft_beams):
    for seed in range(40):
        tree = outcome(seed, strategy="tree-speculative", draft_beams=draft_beams)
        assert all_tokens(tree) == all_tokens(outcome(seed, strategy="sample"))


def test_single_memory_goes_on_with_one_beam():
    for seed in range(10):
        result = outcome(seed, strategy="dsbd", memory="single", num_beams=4, eos_token_id=None)
        assert len(result.sequences) == 1


def test_replacement_returns_repeats_and_equals_beam_sample():
    common = {"num_beams": 3, "num_return_sequences": 3, "replacement": True, "temperature": 0.3}
    has_repeat = False
    for seed in range(30):
        plain = outcome(seed, strategy="beam-sample", **common)
        fixed = outcome(seed, strategy="dsbd", width_policy="fixed", **common)
        assert all_tokens(plain) == all_tokens(fixed) and len(plain.sequences) == 3
        tokens = [tuple(sequence.token_ids) for sequence in plain.sequences]
        has_repeat |= len(set(tokens)) < 3
    assert has_repeat
