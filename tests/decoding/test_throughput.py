"""Drafting policy "throughput": invisible in the output, ample where it pays, silent where not."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, TableModel, decode_steps
from dsbd_ort.decoding.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.experience import Experience, _never_falling
from tests.decoding.tables import LogitsOf, all_tokens, mixed_table, random_table

VOCAB = 8
TARGET = random_table(1, VOCAB)
HOSTILE = random_table(2, VOCAB)
DRAFTS = {"itself": TARGET, "decent": mixed_table(TARGET, HOSTILE, 0.8), "hostile": HOSTILE}

CHEAP_DRAFT = CostCurve((1, 8), (1e-4, 2e-4))
FREE_ROWS = EngineCosts(CostCurve((1, 64), (1e-2, 1.01e-2)), CHEAP_DRAFT)
DEAR_ROWS = EngineCosts(CostCurve((1, 64), (1e-3, 64e-3)), CHEAP_DRAFT)

PAIRS = [  # (strategy that drafts, the one with the same output, num_beams)
    ("dsbd", "beam-sample", 1),
    ("dsbd", "beam-sample", 3),
    ("speculative", "sample", 1),
    ("tree-speculative", "sample", 1),
    ("speculative-beam-search", "beam-search", 3),
]


def generate(
    draft: LogitsOf | None,
    seed: int,
    costs: EngineCosts = FREE_ROWS,
    experience: Experience | None = None,
    **options: object,
) -> DecodeResult:
    config = DecodingConfig(**{"max_new_tokens": 24, "eos_token_id": 7, **options})  # type: ignore[arg-type]
    steps = decode_steps(
        TableModel(VOCAB, TARGET),
        TableModel(VOCAB, draft) if draft else None,
        (seed % VOCAB, 1, 0),
        config,
        np.random.default_rng(seed),
        costs=costs,
        experience=experience,
    )
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: DecodeResult = stop.value
            return result


@pytest.mark.parametrize("costs", [FREE_ROWS, DEAR_ROWS], ids=["free rows", "dear rows"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("strategy", "plain", "num_beams"), PAIRS)
def test_the_output_is_that_without_a_draft(strategy, plain, num_beams, draft, costs):
    common = {"num_beams": num_beams, "num_return_sequences": num_beams}
    experience = Experience.initial()
    for seed in range(6):
        expected = generate(None, seed, strategy=plain, **common)
        result = generate(
            DRAFTS[draft],
            seed,
            costs,
            experience,
            strategy=strategy,
            draft_policy="throughput",
            **common,
        )
        assert all_tokens(result) == all_tokens(expected)


def long_run(draft: LogitsOf, costs: EngineCosts, **options: object) -> DecodeResult:
    options = {"num_beams": 2, "max_new_tokens": 200, "eos_token_id": None, **options}
    return generate(draft, 0, costs, draft_policy="throughput", **options)


def test_a_draft_that_is_always_right_is_drafted_to_the_limit():
    stats = long_run(TARGET, FREE_ROWS, draft_length=6).stats
    assert stats.mean_acceptance_length > 6.0


def test_rows_that_cost_nothing_are_taken_and_dear_ones_are_not():
    decent = DRAFTS["decent"]
    rows = {
        name: long_run(decent, costs).stats.target_rows
        for name, costs in (("free", FREE_ROWS), ("dear", DEAR_ROWS))
    }
    assert rows["free"] > 1.5 * rows["dear"]


def test_a_draft_that_is_never_right_is_given_up_but_tried_again():
    stats = long_run(HOSTILE, DEAR_ROWS).stats
    assert stats.num_draft_tokens < 0.15 * stats.num_spec_steps
    later = [generate(HOSTILE, s, DEAR_ROWS, draft_policy="throughput") for s in range(3)]
    assert all(result.stats.draft_calls >= 1 for result in later)  # every request starts afresh


def test_experience_is_carried_from_request_to_request():
    experience = Experience.initial()
    options = {"num_beams": 2, "max_new_tokens": 60, "eos_token_id": None}
    for seed in range(4):
        generate(HOSTILE, seed, DEAR_ROWS, experience, draft_policy="throughput", **options)
    taught = generate(HOSTILE, 9, DEAR_ROWS, experience, draft_policy="throughput", **options)
    fresh = generate(HOSTILE, 9, DEAR_ROWS, draft_policy="throughput", **options)
    assert taught.stats.num_draft_tokens < fresh.stats.num_draft_tokens


def test_costs_are_measured_where_none_are_given():
    costs: EngineCosts | None = None
    result = generate(TARGET, 0, costs, draft_policy="throughput")  # type: ignore[arg-type]
    assert all_tokens(result) == all_tokens(generate(None, 0, strategy="beam-sample"))


def test_experience_counts_by_gap_and_depth():
    experience = Experience.initial()
    gaps = np.array([0.01, 0.7, 5.0])
    first_guess = experience.accepted(gaps, 0)
    assert (np.diff(first_guess) > 0).all()
    for _ in range(200):
        experience.learn(gaps, np.array([False, True, True]), 0)
    experience.refresh()
    learned = experience.accepted(gaps, 0)
    assert learned[0] < 0.1 and learned[1] > 0.95 and learned[2] > 0.95
    assert experience.accepted(gaps, 1) == pytest.approx(first_guess)
    for _ in range(200):
        experience.learn(gaps, np.array([False, False, True]), 3)
    experience.refresh()
    assert experience.accepted(gaps, 5)[1] < 0.15  # pooled with guesses about smaller gaps


def test_a_wider_gap_is_never_worse():
    enough, seen = np.array([1.0, 3.0, 1.0, 1.0]), np.array([2.0, 4.0, 4.0, 1.0])
    assert _never_falling(enough, seen).tolist() == [0.5, 0.5, 0.5, 1.0]


def test_what_was_never_seen_stays_a_guess_however_long_it_runs():
    experience = Experience.initial()
    seen_gap, other_gap = np.array([0.01]), np.array([5.0])
    first_guess = experience.accepted(other_gap, 0)
    for _ in range(100_000):
        experience.learn(seen_gap, np.array([True]), 0)
    experience.refresh()
    assert experience.accepted(other_gap, 0) == pytest.approx(first_guess, abs=0.05)
