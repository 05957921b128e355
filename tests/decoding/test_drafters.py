"""Drafters: with any of them the output is the target's, and their proposals pay."""

import itertools
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, TableModel, decode
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.drafting.drafters import ChainedDrafter
from dsbd_ort.decoding.drafting.ngram import NGramCounts, NGramDrafter, NGramPool
from dsbd_ort.decoding.errors import ConfigError, DecodingError
from dsbd_ort.decoding.kv_cache import PrefixCache, SharedKVCache
from dsbd_ort.decoding.result import DecodeResult
from dsbd_ort.decoding.set_up import set_up
from tests.decoding.exact_laws import ScriptedChance, law_of, total_variation
from tests.decoding.path_constraint import PathConstraint
from tests.decoding.tables import (
    LogitsOf,
    all_tokens,
    decoded,
    final_beams,
    mixed_table,
    random_table,
    request_on,
)

VOCAB, EOS = 9, 8
COSTS = EngineCosts(CostCurve((1, 16), (1e-2, 1.4e-2)), CostCurve((1, 16), (2e-3, 3e-3)))


def copying(seed: int, spread: float) -> LogitsOf:
    """A table that looks at the last two tokens alone, so that its texts repeat themselves."""
    table = random_table(seed, VOCAB, spread)
    return lambda path: table((0, *path[-2:]))


TARGET = copying(1, 4.0)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
DRAFTERS = ("ngram", "model+ngram", "none", "model")
POLICIES: list[dict[str, Any]] = [
    {"draft_policy": "fixed", "draft_length": 3},
    {"draft_policy": "throughput"},
]
PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    ("speculative", "sample", {}),
    ("tree-speculative", "sample", {"top_k": 4}),
    ("dsbd", "beam-sample", {"num_beams": 2, "num_return_sequences": 2}),
    ("dsbd", "beam-sample", {"num_beams": 4, "num_return_sequences": 4, "temperature": 0.6}),
    ("speculative-beam-search", "beam-search", {"num_beams": 3, "num_return_sequences": 3}),
]


def one_after_some(path: tuple[int, ...]) -> set[int]:
    """Forces chains of tokens, with a choice of two or three between them."""
    first = (2 * path[-1] + len(path)) % EOS
    if len(path) % 4:
        return {first}
    return {first, (first + 3) % EOS, (first + 5) % EOS, EOS}


PROCESSING: dict[str, dict[str, Any]] = {
    "free": {},
    "forced": {"constraint": PathConstraint(VOCAB, one_after_some, (EOS,))},
    "forced bits": {"constraint": PathConstraint(VOCAB, one_after_some, (EOS,), as_bits=True)},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 6},
    "large scores": {"presence_penalty": -1e6, "logit_bias": {2: 1e9, 3: 1e9}},
}


def answer(
    config: DecodingConfig, seed: int, target: LogitsOf = TARGET, **more: Any
) -> DecodeResult:
    prompt = tuple(np.random.default_rng(seed).integers(0, EOS, 1 + seed % 7).tolist())
    draft = TableModel(VOCAB, DRAFT) if config.has_draft_model else None
    request = request_on(config, prompt, seed, costs=COSTS, **more)
    return decoded(request, TableModel(VOCAB, target), draft)


@pytest.mark.parametrize(("strategy", "plain", "shape"), PAIRS)
@pytest.mark.parametrize("name", PROCESSING)
def test_the_output_is_that_without_a_draft(strategy, plain, shape, name):
    common = {**shape, **PROCESSING[name], "max_new_tokens": 24, "eos_token_id": EOS}
    shared = {"ngram_pool": NGramPool(512), "estimator": AcceptanceEstimator()}
    for seed in range(4):
        expected = answer(DecodingConfig(strategy=plain, **common), seed)
        for drafter, policy in itertools.product(DRAFTERS, POLICIES):
            shape_of_draft = {} if drafter == "none" else policy
            config = DecodingConfig(strategy=strategy, drafter=drafter, **shape_of_draft, **common)
            found = answer(config, seed, **shared)
            assert all_tokens(found) == all_tokens(expected), (drafter, policy, seed)


@pytest.mark.parametrize("shape", [{}, {"constraint": PathConstraint(3, lambda p: {len(p) % 3})}])
@pytest.mark.parametrize("drafter", ["ngram", "model+ngram"])
def test_the_rejection_coupling_is_exact_by_enumeration(drafter, shape):
    """Every draft, coin and draw; the draft is a point mass, or lists a few tokens."""
    target = random_table(21, 3, spread=1.0)
    draft = mixed_table(target, random_table(22, 3), 0.5)
    prompt = (1, 2, 1, 2, 1)
    common = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 2, **shape}

    def run(chance: ScriptedChance, **options: Any) -> tuple[Any, ...]:
        config = DecodingConfig(coupling="rejection", **options, **common)
        request = request_on(config, prompt, random_source=chance)
        return final_beams(decoded(request, TableModel(3, target), TableModel(3, draft)))

    drafted = {"strategy": "dsbd", "drafter": drafter, "width_policy": "fixed", "draft_length": 2}
    law = law_of(lambda chance: run(chance, **drafted))
    expected = law_of(lambda chance: run(chance, strategy="beam-sample"))
    assert total_variation(law, expected) < 1e-12


def test_what_repeats_is_drafted_without_a_model():
    """A nearly certain table of the last two tokens: after one round its text repeats."""
    certain = copying(5, 40.0)
    config = DecodingConfig(strategy="speculative", drafter="ngram", max_new_tokens=200)
    stats = answer(config, 3, certain).stats
    assert stats.draft_calls == 0 and stats.draft_rows == 0
    assert stats.mean_acceptance_length > 3.0


def test_a_long_repetition_is_believed_before_the_model():
    certain = copying(5, 40.0)
    options = {"strategy": "speculative", "max_new_tokens": 200, "draft_policy": "fixed"}
    with_ngrams, without = (
        answer(DecodingConfig(drafter=drafter, **options), 3, certain).stats.draft_calls
        for drafter in ("model+ngram", "model")
    )
    assert with_ngrams < without / 4


@pytest.mark.parametrize("strategy", ["speculative", "dsbd", "speculative-beam-search"])
@pytest.mark.parametrize("policy", POLICIES)
def test_forced_tokens_need_no_draft_call(strategy, policy):
    constraint = PathConstraint(VOCAB, lambda path: {(path[-1] + 1) % EOS})
    config = DecodingConfig(
        strategy=strategy, constraint=constraint, max_new_tokens=40, drafter="model", **policy
    )
    stats = answer(config, 2).stats
    assert stats.draft_calls == 0  # not even the prompt's
    assert stats.mean_acceptance_length > 3.0
    assert stats.num_accepted_tokens == stats.num_draft_tokens - (stats.num_draft_tokens > 39)


@pytest.mark.parametrize("policy", [{"draft_policy": "fixed", "draft_length": 2}, POLICIES[1]])
def test_a_small_subtree_is_drafted_whole_where_that_costs_less_than_the_model(policy):
    constraint = PathConstraint(VOCAB, lambda path: {len(path) % 8, (len(path) + 1) % 8})
    options = {"num_beams": 4, "constraint": constraint, "max_new_tokens": 12, "drafter": "model"}
    dear_rows = EngineCosts(CostCurve((1, 16), (1e-2, 2e-2)), CostCurve((1, 16), (1e-5, 1e-4)))
    num_whole = []  # share of the layers
    for costs, uses_model in ((COSTS, False), (dear_rows, True)):
        shape = {"draft_beams": 4 if uses_model else (8, 16)} if "draft_length" in policy else {}
        config = DecodingConfig(**options, **policy, **shape)
        models = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
        stats = decoded(request_on(config, (1, 2), costs=costs), *models).stats
        num_whole.append((1 + stats.num_draft_layers - stats.draft_calls) / stats.num_draft_layers)
    assert num_whole[0] > num_whole[1]


def test_a_drafter_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match="drafter is 'ngram', which means nothing to strategy mj"):
        DecodingConfig(strategy="mjsd", drafter="ngram")
    with pytest.raises(ConfigError, match="drafter is 'ngram', which means nothing to strategy be"):
        DecodingConfig(strategy="beam-search", drafter="ngram")
    with pytest.raises(ConfigError, match="draft_length is 2, which means nothing with drafter"):
        DecodingConfig(drafter="none", draft_length=2)
    assert DecodingConfig(drafter="none").layer_widths == ()
    config = DecodingConfig(strategy="dsbd")
    with pytest.raises(DecodingError, match="give a draft model, drafter 'ngram'"):
        decode(TableModel(VOCAB, TARGET), None, [1], config, np.random.default_rng(0))


def test_counts_are_those_of_the_text():
    counts = NGramCounts()
    counts.add_text([1, 2, 3, 1, 2, 4, 1, 2, 4])
    assert counts.following.get(hash((1, 2))) == {3: 1, 4: 2}
    assert counts.following.get(hash((3,))) == 1
    assert counts.following.get(hash((2, 4, 1))) == 2
    assert counts.following.get(hash((9,))) is None
    assert counts.num_tokens == 8


def test_probabilities_are_shared_by_length_and_count():
    drafter = NGramDrafter([1, 2, 3, 1, 2, 4, 1, 2], None, 1.0, only_long_matches=False)
    found = drafter.proposals(np.array([0]))
    assert sorted(found.tokens.tolist()) == [3, 4]
    probabilities = np.exp(found.log_probs)
    assert probabilities.sum() + found.unlisted[0] == pytest.approx(1.0)
    assert probabilities[0] == pytest.approx(probabilities[1])
    sharper = NGramDrafter([1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2], None, 0.5, only_long_matches=False)
    plain = NGramDrafter([1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2], None, 1.0, only_long_matches=False)
    most = [d.proposals(np.array([0])).log_probs.max() for d in (plain, sharper)]
    assert most[1] > most[0]
    only_long = NGramDrafter([1, 2, 3, 1, 2, 4, 1, 2], None, 1.0, only_long_matches=True)
    assert only_long.proposals(np.array([0])).tokens.size == 0


def test_a_pool_is_bounded_and_forgets_the_oldest():
    pool = NGramPool(100)
    for first in range(50):
        pool.add_text(range(first, first + 30))
        assert pool.num_tokens <= 100
    assert all(counts.following.get(hash((3,))) is None for counts in pool.counts)
    assert any(counts.following.get(hash((75,))) is not None for counts in pool.counts)
    pool.add_text(range(1000, 2000))
    assert pool.num_tokens <= 100
    assert any(counts.following.get(hash((1998,))) == 1999 for counts in pool.counts)


def test_what_the_model_lists_does_not_count_as_unlisted():
    """If the n-grams list one of two beams, only the mass that they leave out of it is unlisted."""
    config = DecodingConfig(num_beams=2, drafter="model+ngram", max_new_tokens=4)

    def drafter_of(prompt: tuple[int, ...]) -> ChainedDrafter:
        caches = (SharedKVCache(TableModel(VOCAB, table)) for table in (TARGET, DRAFT))
        views = (CacheView(cache, PrefixCache()) for cache in caches)
        drafter = set_up(request_on(config, prompt), *views).draft_stage.drafter
        assert isinstance(drafter, ChainedDrafter)
        return drafter

    drafter = drafter_of((1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5))
    assert drafter.look_up(np.array([0]), lambda *_: False).pending.tolist() == []  # a long match
    listed = drafter.joint(np.array([0]), np.zeros(1), None)
    mass = np.exp(listed.log_masses).sum() + np.exp(listed.log_unlisted)
    assert mass == pytest.approx(1.0)
    drafter = drafter_of((7,))
    assert drafter.look_up(np.array([0]), lambda *_: False).pending.tolist() == [0]
    assert drafter._layer is not None
    assert drafter._layer.unlisted.tolist() == [0.0]


SOURCE = (3, 1, 4, 1, 5, 0, 2, 6, 5, 3)


def copied(copied_ids: tuple[int, ...]) -> DecodeResult:
    """The answer of a target that copies SOURCE after its start token, drafted by n-grams."""

    def follows(path: tuple[int, ...]) -> Any:
        wanted = (*SOURCE, EOS)[min(len(path) - 1, len(SOURCE))]
        return np.where(np.arange(VOCAB) == wanted, 6.0, np.arange(VOCAB) / VOCAB)

    config = DecodingConfig(
        strategy="speculative-beam-search",
        num_beams=1,
        drafter="ngram",
        draft_policy="fixed",
        draft_length=4,
        draft_beams=2,
        eos_token_id=EOS,
    )
    return decoded(request_on(config, (7,), copied_ids=copied_ids), TableModel(VOCAB, follows))


def test_a_source_is_copied_from_its_beginning_on():
    with_source, without = copied(SOURCE), copied(())
    assert with_source.sequences[0].token_ids == [*SOURCE, EOS]
    assert without.sequences[0].token_ids == [*SOURCE, EOS]
    assert with_source.stats.num_iterations <= 4 < without.stats.num_iterations
