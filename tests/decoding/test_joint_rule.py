"""MJSD and MJGD against definitions written out by brute force."""

import itertools
import math

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig
from tests.decoding.tables import mixed_table, random_table, run

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 4
TARGET = random_table(31, VOCAB)
DRAFT = mixed_table(TARGET, random_table(32, VOCAB), 0.6)
PROMPT = (1, 0, 1)


def log_prob(table, path, token):
    logits = np.asarray(table(path), dtype=np.float32).astype(np.float64)
    return logits[token] - np.log(np.exp(logits).sum())


def joint_log_prob(table, path, tokens):
    total = 0.0
    for token in tokens:
        total += log_prob(table, path, token)
        path = (*path, token)
    return total


def best_block(table, path, length):
    blocks = itertools.product(range(VOCAB), repeat=length)
    return max(blocks, key=lambda block: joint_log_prob(table, path, block))


@pytest.mark.parametrize("table_seed", range(5))
def test_mjgd_takes_the_likeliest_block_when_its_beams_cover_the_tree(table_seed):
    target = random_table(table_seed, VOCAB)
    config = DecodingConfig(
        strategy="mjgd", temperature=0.0, joint_tokens=3, joint_beams=64, max_new_tokens=6
    )
    first = best_block(target, PROMPT, 3)
    second = best_block(target, PROMPT + first, 3)
    assert run(config, target, None, VOCAB, 0).sequences[0].token_ids == [*first, *second]


def expected_mjsd(gamma, draft_beams, threshold, num_tokens):
    """One path; draft beam search, the deepest passing depth, then the target's best token."""
    path: tuple[int, ...] = ()
    while len(path) < num_tokens:
        beams = [()]
        accepted = ()
        for _ in range(min(gamma, num_tokens - len(path) - 1)):
            grown = [(*beam, token) for beam in beams for token in range(VOCAB)]
            grown.sort(key=lambda b: -joint_log_prob(DRAFT, PROMPT + path, b))
            beams = grown[:draft_beams]
            largest_q = joint_log_prob(DRAFT, PROMPT + path, beams[0])
            best = max(beams, key=lambda b: joint_log_prob(TARGET, PROMPT + path, b))
            ratio = joint_log_prob(TARGET, PROMPT + path, best) - largest_q
            if ratio > math.log(threshold):
                accepted = best
        path += accepted
        path += (int(np.argmax(TARGET(PROMPT + path))),)
    return list(path)


@pytest.mark.parametrize("gamma", [1, 3, 4])
@pytest.mark.parametrize("draft_beams", [1, 3])
@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.9])
def test_mjsd_accepts_the_deepest_passing_beam(gamma, draft_beams, threshold):
    config = DecodingConfig(
        strategy="mjsd",
        temperature=0.0,
        draft_length=gamma,
        draft_beams=draft_beams,
        joint_threshold=threshold,
        max_new_tokens=12,
    )
    result = run(config, TARGET, DRAFT, VOCAB, 0)
    expected = expected_mjsd(gamma, draft_beams, threshold, 12)
    assert result.sequences[0].token_ids == expected


def test_joint_likelihood_lies_between_greedy_and_mjgd():
    totals = dict.fromkeys(("greedy", "mjsd", "mjgd"), 0.0)
    for seed in range(40):
        target = random_table(100 + seed, VOCAB)
        draft = mixed_table(target, random_table(200 + seed, VOCAB), 0.8)
        for strategy in totals:
            config = DecodingConfig(strategy=strategy, temperature=0.0, max_new_tokens=12)
            drafts = draft if config.row.has_draft else None
            totals[strategy] += run(config, target, drafts, VOCAB, 0).sequences[0].logprob
    assert totals["greedy"] < totals["mjgd"]
    assert totals["mjsd"] < totals["mjgd"]


def test_mjsd_draws_its_last_token_from_the_target():
    config = DecodingConfig(strategy="mjsd", draft_length=0, max_new_tokens=1)
    counts = np.zeros(VOCAB)
    for seed in range(4000):
        counts[run(config, TARGET, DRAFT, VOCAB, seed).sequences[0].token_ids[0]] += 1
    law = np.exp([log_prob(TARGET, PROMPT, token) for token in range(VOCAB)])
    np.testing.assert_allclose(counts / 4000, law, atol=0.03)
