"""Requests whose rows were dropped half-way go on as if nothing had happened."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_ort.decoding import DecodingRequest, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK
from tests.decoding.feature_tables import pair_of
from tests.decoding.preempting import Together, request_of, together
from tests.decoding.tables import Watched, all_tokens, mixed_table, outcomes, random_table, run
from tests.decoding.top_table import TopTable

VOCAB, EOS = 6, 5
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
KINDS: list[dict[str, Any]] = [
    {"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed"},
    {"strategy": "dsbd", "num_beams": 2, "width_policy": "threshold"},
    {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed", "draft_policy": "throughput"},
    {"strategy": "dsbd", "num_beams": 3, "coupling": "rejection"},
    {"strategy": "dsbd", "num_beams": 3, "replacement": True},
    {"strategy": "dsbd", "num_beams": 2, "memory": "single"},
    {"strategy": "speculative", "draft_length": 5},
    {"strategy": "speculative", "coupling": "rejection"},
    {"strategy": "tree-speculative", "temperature": 0.7},
    {"strategy": "sample"},
    {"strategy": "beam-sample", "num_beams": 3},
    {"strategy": "greedy"},
    {"strategy": "beam-search", "num_beams": 2},
    {"strategy": "speculative-beam-search", "num_beams": 3},
    {"strategy": "mjsd", "draft_beams": 2},
    {"strategy": "mjgd", "joint_beams": 3},
]
ALWAYS = itertools.repeat(True)


def requests_of(kind: dict[str, Any], num_new: int = 24) -> list[DecodingRequest]:
    """Four requests, two of which begin alike."""
    prompts = [(1, 2, 3), (1, 2, 3, 4), (0, 4), (3,)]
    return [request_of(kind, prompt, seed, num_new) for seed, prompt in enumerate(prompts)]


def alone(request: DecodingRequest, seed: int) -> list[Any]:
    again = dataclasses.replace(request, rng=np.random.default_rng(seed))
    forest = BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
    (outcome,) = Together(forest, [again]).run(ALWAYS).outcomes.values()
    if request.costs is None:  # decode would measure them
        prompt = tuple(request.prompt_ids)
        assert all_tokens(outcome) == all_tokens(
            run(request.config, TARGET, DRAFT, VOCAB, seed, prompt)
        )
    return all_tokens(outcome)


def engines(has_features: bool) -> tuple[TableModel, TableModel]:
    """Both pairs return the same: a draft is not seen."""
    if has_features:
        return pair_of(VOCAB, TARGET, DRAFT, random_table(2, VOCAB), several=True)
    return TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)


def small(max_rows: int) -> tuple[BatchedDecoder, list[Watched]]:
    models = [Watched(TableModel(VOCAB, table)) for table in (TARGET, DRAFT)]
    return BatchedDecoder(*models, max_rows=max_rows), models


LONG = tuple(np.random.default_rng(0).integers(5, size=300).tolist())
FIXED = {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed"}


@pytest.mark.parametrize("has_features", [False, True])
def test_a_prompt_may_be_preempted_half_way_and_rows_come_back_in_chunks(
    has_features: bool,
) -> None:
    """Rows for little more than one request: preempted at any point of its prompt."""
    for max_rows in (380, 430, 560):
        prompts = [LONG[:280], LONG[::-1], LONG[100:], (*LONG[:150], 1)]
        requests = [request_of(FIXED, prompt, seed) for seed, prompt in enumerate(prompts)]
        models = [Watched(model) for model in engines(has_features)]
        done = together(BatchedDecoder(*models, max_rows=max_rows), requests, max_rows)
        for number, request in enumerate(requests):
            assert all_tokens(done.outcomes[number]) == alone(request, number)
        assert sum(done.num_preempted.values()) >= 3
        assert max(max(model.rows_of_calls) for model in models) <= PREFILL_CHUNK + 4 * 16


@pytest.mark.parametrize("shares", [True, False])
def test_recomputed_rows_are_counted_but_for_those_of_a_shared_prompt(shares: bool) -> None:
    options = {"strategy": "sample"}
    requests = [request_of(options, LONG[:99], seed) for seed in range(2)]
    target = Watched(TableModel(VOCAB, TARGET))
    forest = BatchedDecoder(target, TableModel(VOCAB, DRAFT), shares_prefixes=shares)
    first, second = (forest.join(request) for request in requests)
    for _ in range(6):  # of the prompt, of five tokens
        forest.iterate()
    forest.preempt(second)
    forest.resume(second)
    results = outcomes(forest)
    rows = [results[member].stats.target_rows for member in (first, second)]
    assert rows == [98 + 24, (0 if shares else 2 * 98) + 5 + 24]
    assert sum(rows) == sum(target.rows_of_calls)
    for number, member in enumerate((first, second)):
        assert all_tokens(results[member]) == alone(requests[number], number)


def test_a_search_with_long_prompts_reads_the_logits_that_it_needs() -> None:
    """An engine keeps those of its last rows: rows without logits go before them."""
    models = [TopTable(VOCAB, table, 2, keeps_full=True) for table in (TARGET, DRAFT)]
    search = {"strategy": "beam-search", "num_beams": 2}
    requests = [request_of(search, prompt, 0, 6) for prompt in ((1, 2), 4 * LONG)]
    done = Together(BatchedDecoder(*models), requests).run(ALWAYS)
    assert max(map(len, models[0].rows_read)) > 0
    for number, request in enumerate(requests):
        assert all_tokens(done.outcomes[number]) == alone(request, number)


def test_a_search_over_too_few_candidates_reads_what_it_would_read_alone() -> None:
    """A beam whose logits are read later is computed again: also right after a preemption."""
    kind = {"strategy": "speculative-beam-search", "num_beams": 3}

    def models() -> list[TopTable]:
        return [TopTable(VOCAB, table, 3, keeps_full=True) for table in (TARGET, DRAFT)]

    requests = requests_of(kind, 40)
    done = together(BatchedDecoder(*models(), max_rows=70), requests, 0)
    for number, request in enumerate(requests):
        (lone,) = Together(BatchedDecoder(*models()), [request]).run(ALWAYS).outcomes.values()
        assert all_tokens(done.outcomes[number]) == all_tokens(lone)
    assert sum(done.num_preempted.values()) >= 3


@pytest.mark.parametrize("num_iterations", [0, 1, 2, 3, 5])
def test_who_leaves_while_preempted_or_coming_back_leaves_nothing(num_iterations: int) -> None:
    """The rows of 280 tokens come back in four calls, two of each engine."""
    requests = [request_of(FIXED, prompt, n) for n, prompt in enumerate([(1, 2), LONG[:280]])]
    requests[0] = request_of(FIXED, (1, 2), 0, 90)
    forest, _ = small(10_000)
    first, second = (forest.join(request) for request in requests)
    for _ in range(6):
        forest.iterate()
    forest.preempt(second)
    if num_iterations:
        forest.resume(second)
    for _ in range(num_iterations):
        assert second.preemption is not None or num_iterations == 5
        forest.iterate()
    forest.leave(second)
    forest.leave(second)  # again: it is gone already
    assert all_tokens(outcomes(forest)[first]) == alone(requests[0], 0)
    assert all(not cache._views for cache in forest.caches.values())


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_engine_that_fails_while_rows_come_back_ends_those_in_the_call(role: str) -> None:
    request = request_of(FIXED, LONG[:280], 0)
    forest, models = small(10_000)
    member = forest.join(request)
    for _ in range(6):
        forest.iterate()
    forest.preempt(member)
    forest.resume(member)
    model = models[role == "draft"]
    model._failing_call = len(model.rows_of_calls) + 2  # its second chunk
    ends = [progress.event for _ in range(5) for progress in forest.iterate()]
    assert [str(end) for end in ends] == ["no memory"]
    assert all(not cache._views for cache in forest.caches.values())
    assert forest.num_live == 0


@pytest.mark.parametrize("has_features", [False, True])
def test_one_that_is_preempted_at_any_time_and_again_loses_nothing(has_features: bool) -> None:
    """Also while its rows come back."""
    expected = alone(request_of(FIXED, LONG[:280], 0, 70), 0)
    for num_before, num_between in itertools.product(range(9), range(5)):
        forest = BatchedDecoder(*engines(has_features))
        member = forest.join(request_of(FIXED, LONG[:280], 0, 70))
        for _ in range(num_before):
            forest.iterate()
        for _ in range(3):
            forest.preempt(member)
            assert member.num_rows >= 280 or num_before < 4
            forest.resume(member)
            for _ in range(num_between):
                forest.iterate()
        assert all_tokens(outcomes(forest)[member]) == expected
        assert all(not cache._views for cache in forest.caches.values())


def test_random_requests_are_preempted_often() -> None:
    """Whole requests do this with all options; here it is counted."""
    counts = []

    @settings(max_examples=30, deadline=None, database=None, derandomize=True)
    @given(st.sampled_from(KINDS), st.integers(20, 90), st.integers(0, 2**20))
    def holds(kind: dict[str, Any], max_rows: int, seed: int) -> None:
        forest, _ = small(max_rows)
        requests = requests_of(kind, 12)
        done = together(forest, requests, seed)
        for number, request in enumerate(requests):
            assert all_tokens(done.result(number)) == alone(request, number)
        counts.append(sum(done.num_preempted.values()))

    holds()
    assert sum(count > 0 for count in counts) > len(counts) / 2, counts
