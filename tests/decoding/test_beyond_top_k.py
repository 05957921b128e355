"""Sampling from more tokens than a top-k head returns: the law, and which rows are read whole."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsbd_ort.decoding.beyond_top_k as beyond_top_k
import dsbd_ort.decoding.warp as warp_module
from dsbd_forward.logits import AllLogits, DenseLogits, TopLogits
from dsbd_forward.rows import added_up, largest_logits
from dsbd_ort.decoding import ConfigError, DecodingConfig, TableModel, decode
from dsbd_ort.decoding.beyond_top_k import settled
from dsbd_ort.decoding.warp import Warp
from tests.decoding.exact_laws import chi_square_p_value
from tests.decoding.tables import check_like_dense, mixed_table, random_table
from tests.decoding.top_table import TopTable

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB, EOS, PROMPT = 40, 3, (1, 2)
NUM_TOP = 6
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)

WARPS = [
    {},
    {"temperature": 0.4},
    {"top_p": 0.7},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_p": 0.6, "temperature": 1.8},
    {"min_p": 0.2},
    {"top_p": 0.8, "min_p": 0.1, "typical_p": 0.7},
    {"typical_p": 0.6},
    {"top_k": 15},
    {"top_k": 15, "top_p": 0.8},
]
STRATEGIES = [
    {"strategy": "sample"},
    {"strategy": "speculative"},
    {"strategy": "beam-sample", "num_beams": 3},
    {"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed"},
    {"strategy": "dsbd", "num_beams": 2},
]


def decoded(models, seed, options):
    config = DecodingConfig(max_new_tokens=8, eos_token_id=EOS, **options)
    draft = models[1] if config.row.has_draft else None
    return decode(models[0], draft, PROMPT, config, np.random.default_rng(seed))


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_tokens_are_those_of_all_logits(strategy, warp, monkeypatch):
    """Also if a later part of a forward has overwritten the first rows.

    Rows that are read whole are settled by 10 or 20 of their logits, or sorted whole.
    """
    monkeypatch.setattr(beyond_top_k, "_NUMBERS", (10, 20))
    for seed in range(4):
        dense = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
        draft = TopTable(VOCAB, DRAFT, NUM_TOP)  # proposes fewer: no token shows it
        models = TopTable(VOCAB, TARGET, NUM_TOP, keeps_full=True), draft
        wanted, found = (decoded(each, seed, strategy | warp) for each in (dense, models))
        check_like_dense(found, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "dsbd", "coupling": "rejection", "replacement": True},
        {"strategy": "tree-speculative", "coupling": "rejection", "temperature": 0.6},
        {"strategy": "mjsd", "top_p": 0.9},
        {"strategy": "mjgd"},
    ],
    ids=str,
)
def test_rules_that_read_the_draft(options):
    """With a draft that returns all: what it proposes decides there."""
    for seed in range(4):
        draft = TableModel(VOCAB, DRAFT)
        wanted = decoded((TableModel(VOCAB, TARGET), draft), seed, options)
        target = TopTable(VOCAB, TARGET, NUM_TOP, keeps_full=True)
        check_like_dense(decoded((target, TableModel(VOCAB, DRAFT)), seed, options), wanted)


def test_the_law_with_rejection():
    """Its coins are tossed over the listed tokens only."""
    warp = {"top_p": 0.7, "temperature": 1.2}
    config = DecodingConfig(
        strategy="speculative", coupling="rejection", max_new_tokens=2, draft_length=2, **warp
    )
    found = Counter()
    for seed in range(1200):
        models = TopTable(VOCAB, TARGET, NUM_TOP, keeps_full=True), TopTable(VOCAB, DRAFT, NUM_TOP)
        result = decode(*models, PROMPT, config, np.random.default_rng(seed))
        found[result.sequences[0].token_ids[0]] += 1
    logits = TARGET(PROMPT)[None].astype(np.float64)
    probs = np.exp(Warp(1.2, 0, 0.7).warped(logits - logits.max()))[0]
    law = {token: prob for token, prob in enumerate(probs.tolist()) if prob}
    assert set(found) <= set(law)
    assert chi_square_p_value(found, law, 1200) > 1e-3


def test_settled_rows_are_not_read():
    options = {"strategy": "sample", "max_new_tokens": 40, "top_p": 0.6, "temperature": 0.3}
    target = TopTable(VOCAB, TARGET, NUM_TOP, keeps_full=True)
    config = DecodingConfig(**options)
    decode(target, None, PROMPT, config, np.random.default_rng(0))
    assert len(target.rows_read) < 8


def test_an_engine_that_keeps_no_other_logits_refuses():
    with pytest.raises(ConfigError, match="keeps no others; use top_k 1 to 6"):
        decoded((TopTable(VOCAB, TARGET, NUM_TOP), None), 0, {"strategy": "sample", "top_p": 0.5})


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.floats(0.2, 3.0),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.6),
    st.sampled_from([0, 9, 30]),
)
def test_what_is_settled_is_what_all_logits_give(seed, spread, temperature, top_p, min_p, top_k):
    warp = Warp(temperature, top_k, top_p, min_p=min_p)
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=(12, VOCAB))).astype(np.float32)
    if seed % 3 == 0:
        logits = np.round(logits)  # ties
    if seed % 5 == 0:
        logits[:6, rng.permutation(VOCAB)[: VOCAB - 4]] = -np.inf  # impossible tokens
    _, scores = largest_logits(logits, NUM_TOP)
    log_probs, is_settled = settled(warp, scores, added_up(logits).astype(np.float32), VOCAB)
    _, of_all = largest_logits(logits, top_k or VOCAB)
    wanted = warp.warped(of_all - of_all[:, :1])
    for row in is_settled.nonzero()[0]:
        assert not np.isfinite(wanted[row, NUM_TOP:]).any()
        np.testing.assert_allclose(
            np.exp(log_probs[row]), np.exp(wanted[row, :NUM_TOP]), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_whose_nucleus_is_among_the_largest_are_settled(temperature):
    logits = (5 * np.random.default_rng(0).normal(size=(500, 2000))).astype(np.float32)
    _, scores = largest_logits(logits, 64)
    warp = Warp(temperature, 0, 0.9)
    _, of_all = largest_logits(logits, 2000)
    could_be = ~np.isfinite(warp.warped(of_all - of_all[:, :1])[:, 63:]).any(axis=1)
    is_settled = settled(warp, scores, added_up(logits), 2000)[1]
    assert could_be.mean() > 0.3 and is_settled.sum() > 0.9 * could_be.sum()


def test_a_row_that_few_logits_leave_open_is_not_sorted_whole(monkeypatch):
    """Rows of 5,000 tokens: one that its 256 best settle, one that 4,096 settle, and a flat one."""
    rng = np.random.default_rng(5)
    widths = np.array([[3.4], [3.0], [0.01]])
    logits = (widths * rng.normal(size=(3, 5000))).astype(np.float32)
    ids, top = largest_logits(logits, 64)
    kept = AllLogits(logits)
    rows = TopLogits(ids, top.astype(np.float32), added_up(logits)[:, 0].astype(np.float32), kept)
    warp = Warp(temperature=1.0, top_k=0, top_p=0.9)
    sorted_whole = []
    cut = warp_module._cut_top_p

    def counted(log_probs, *options):
        sorted_whole.append(log_probs.shape)
        return cut(log_probs, *options)

    monkeypatch.setattr(warp_module, "_cut_top_p", counted)
    found = beyond_top_k.distributions_beyond_top_k(warp, rows, 5000)
    assert set(sorted_whole) == {(1, 5000)}
    wanted = warp.distributions(DenseLogits(logits))
    for row in range(3):
        one, other = found[row], wanted[row]
        drawn = np.flatnonzero(other.log_probs > -np.inf)
        assert len(drawn) > 64
        np.testing.assert_array_equal(one.tokens, drawn)
        np.testing.assert_allclose(one.log_probs, other.log_probs[drawn], rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.raw_log_probs, other.raw_log_probs[drawn], rtol=0, atol=1e-5)
