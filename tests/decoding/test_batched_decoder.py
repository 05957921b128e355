"""Requests that share engine calls get what each would get alone, at any arrival and departure."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_ort.decoding import (
    DecodeResult,
    DecodingConfig,
    DecodingError,
    DecodingRequest,
    ModelError,
    TableModel,
)
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, BatchedRequest
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK
from dsbd_ort.decoding.result import IterationOutput
from dsbd_ort.decoding.row_bounds import most_rows
from tests.decoding.tables import Watched, all_tokens, mixed_table, outcomes, random_table, run

VOCAB, EOS = 6, 5
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
OPTIONS = [
    {"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed"},
    {"strategy": "dsbd", "num_beams": 2, "draft_beams": (4, 3), "draft_length": 2},
    {"strategy": "beam-sample", "num_beams": 2},
    {"strategy": "dsbd", "num_beams": 2, "coupling": "rejection"},
    {"strategy": "speculative", "draft_length": 5},
    {"strategy": "tree-speculative", "temperature": 0.7},
    {"strategy": "speculative-beam-search", "num_beams": 3},
    {"strategy": "beam-search", "num_beams": 2, "max_new_tokens": 3},
    {"strategy": "mjsd", "draft_beams": 2},
    {"strategy": "mjgd", "joint_beams": 3},
    {"strategy": "dsbd", "num_beams": 2, "memory": "single"},
    {"strategy": "sample", "num_return_sequences": 1, "max_new_tokens": 25},
]


ALWAYS = itertools.repeat(True)


@dataclass
class Asked:
    options: dict[str, object]
    prompt: tuple[int, ...]
    seed: int
    result: DecodeResult | None = None
    most_rows: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def config(self) -> DecodingConfig:
        config = DecodingConfig(**{"max_new_tokens": 12, "eos_token_id": EOS, **self.options})
        return config.settled(costs_are_known=False)

    def request(self) -> DecodingRequest:
        rng = np.random.default_rng(self.seed)
        return DecodingRequest(prompt_ids=self.prompt, config=self.config, rng=rng)

    def alone(self) -> list[list[int]]:
        return all_tokens(run(self.config, TARGET, DRAFT, VOCAB, self.seed, self.prompt))


def asked(seed: int, num_requests: int) -> list[Asked]:
    """All kinds of requests; some prompts begin alike, some are one token."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(5, size=size).tolist()) for size in (1, 3, 9, 300)]
    return [
        Asked(
            OPTIONS[i % len(OPTIONS)],
            prompts[rng.integers(4)] + tuple(rng.integers(5, size=rng.integers(3)).tolist()),
            seed + i,
        )
        for i in range(num_requests)
    ]


def answered(
    forest: BatchedDecoder, requests: list[Asked], most_live: int, arrivals: Iterator[bool]
) -> None:
    """Answer all requests: ``arrivals`` says whether one joins before the next iteration."""
    waiting, live = list(requests), dict[int, tuple[BatchedRequest, Asked]]()
    while waiting or live:
        while waiting and len(live) < most_live and (not live or next(arrivals)):
            request = waiting.pop(0)
            member = forest.join(request.request())
            live[id(member)] = (member, request)
        for progress in forest.iterate():
            member, request = live[id(progress.live)]
            if isinstance(progress.event, IterationOutput):
                for i, view in enumerate(member.views.values()):
                    request.most_rows[i] = max(request.most_rows[i], view.num_rows)
                continue
            assert isinstance(progress.event, DecodeResult), progress.event
            request.result = progress.event
            del live[id(member)]
        assert forest.num_live == len(live)


def shared(**settings: Any) -> BatchedDecoder:
    return BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT), **settings)


def coin(seed: int) -> Iterator[bool]:
    rng = np.random.default_rng(seed)
    return iter(lambda: bool(rng.integers(2)), None)


def check_as_alone(requests: list[Asked]) -> None:
    for request in requests:
        assert request.result and all_tokens(request.result) == request.alone(), request


@pytest.mark.parametrize("most_live", [1, 2, 5, 40])
def test_every_request_gets_what_it_would_get_alone(most_live: int) -> None:
    requests = asked(seed=most_live, num_requests=36)
    answered(shared(), requests, most_live, coin(most_live))
    check_as_alone(requests)


def test_whoever_leaves_half_way_takes_nothing_from_the_others() -> None:
    forest, requests = shared(), asked(seed=9, num_requests=12)
    members = {id(member): (member, r) for r in requests for member in [forest.join(r.request())]}
    leaving = [members[key][0] for key in list(members)[::2]]
    for iteration in range(400):
        if iteration == 4:
            for member in leaving:
                forest.leave(member)
                forest.leave(member)  # again: it is gone already
        for progress in forest.iterate():
            if isinstance(progress.event, DecodeResult):
                members[id(progress.live)][1].result = progress.event
    assert forest.num_live == 0
    for member, request in members.values():
        if request.result is None:
            assert member in leaving
        else:
            assert all_tokens(request.result) == request.alone()
    assert sum(request.result is not None for request in requests) >= 6


def test_rows_stay_within_what_the_requests_may_need() -> None:
    requests = asked(seed=5, num_requests=48)
    bounds = [most_rows(len(r.prompt), r.config) for r in requests]
    max_rows = max(sum(bounds[i : i + 4]) for i in range(len(bounds)))
    target, draft = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    most = Watched(target), Watched(draft)
    answered(BatchedDecoder(*most, max_rows=max_rows), requests, 4, ALWAYS)
    check_as_alone(requests)
    for request, bound in zip(requests, bounds, strict=True):
        assert max(request.most_rows) <= bound
    assert 300 < most[0].most_rows <= max_rows


def test_a_full_pool_is_cleared_up_and_never_overflows() -> None:
    """With no room to spare, dead rows go as soon as they are in the way."""
    options = {"strategy": "dsbd", "num_beams": 2, "max_new_tokens": 40}
    requests = [Asked(options, (1, 2, seed % 5), seed) for seed in range(30)]
    bound = most_rows(3, requests[0].config)
    target = Watched(TableModel(VOCAB, TARGET))
    forest = BatchedDecoder(target, TableModel(VOCAB, DRAFT), max_rows=2 * bound)
    answered(forest, requests, 2, ALWAYS)
    assert target.most_rows <= 2 * bound
    check_as_alone(requests)


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "num_beams": st.integers(1, 5),
            "draft_length": st.integers(1, 6),
            "draft_beams": st.integers(1, 7),
            "width_policy": st.just("fixed"),
            "temperature": st.sampled_from([0.3, 1.0, 3.0]),
            "replacement": st.booleans(),
            "max_new_tokens": st.integers(1, 60),
        }
    ),
    st.integers(0, 2**32),
)
def test_no_request_holds_more_rows_than_its_bound(options: dict[str, object], seed: int) -> None:
    options["draft_beams"] = max(options["draft_beams"], options["num_beams"])
    request = Asked(options, (1, 2, 3), seed)
    answered(shared(), [request], 1, ALWAYS)
    assert 0 < max(request.most_rows) <= most_rows(3, request.config)


def test_the_target_is_called_once_an_iteration_for_all() -> None:
    options = {"strategy": "beam-sample", "num_beams": 2, "eos_token_id": None}
    requests = [Asked(options, (1, 2, seed), seed) for seed in range(5)]
    target = Watched(TableModel(VOCAB, TARGET))
    forest = BatchedDecoder(target, TableModel(VOCAB, DRAFT))
    answered(forest, requests, 5, ALWAYS)
    calls = target.rows_of_calls
    assert len(calls) <= 14  # twelve tokens, and the prompts
    assert max(calls) >= 5 * 2
    for request in requests:
        assert request.result.stats.target_calls <= 14
        assert request.result.stats.target_rows < sum(calls) / 3


def test_long_prompts_keep_nobody_waiting_longer_than_one_piece() -> None:
    options = {"strategy": "speculative", "max_new_tokens": 30, "eos_token_id": None}
    rng = np.random.default_rng(0)
    long = [Asked(options, tuple(rng.integers(5, size=700).tolist()), seed) for seed in range(4)]
    target, draft = Watched(TableModel(VOCAB, TARGET)), Watched(TableModel(VOCAB, DRAFT))
    forest = BatchedDecoder(target, draft)
    first = forest.join(Asked(options, (1, 2), 9).request())
    forest.iterate()
    forest.iterate()
    members = [forest.join(request.request()) for request in long]
    results = {}
    for _ in range(200):
        num_calls = len(draft.rows_of_calls)
        progress = forest.iterate()
        if first.wanted is not None:
            assert any(p.live is first for p in progress)
        assert sum(draft.rows_of_calls[num_calls:]) <= PREFILL_CHUNK + 5 * 4
        results.update({id(p.live): p.event for p in progress})
    assert max(target.rows_of_calls) <= PREFILL_CHUNK + 5 * 6
    for member, request in zip(members, long, strict=True):
        assert all_tokens(results[id(member)]) == request.alone()


@pytest.mark.parametrize(("shares_prefixes", "num_computed"), [(True, 200), (False, 1000)])
def test_prompts_that_begin_alike_are_computed_once(
    shares_prefixes: bool, num_computed: int
) -> None:
    options = {"strategy": "speculative", "max_new_tokens": 2}
    begin = tuple(np.random.default_rng(0).integers(5, size=200).tolist())
    forest = shared(shares_prefixes=shares_prefixes)
    first, *others = [Asked(options, (*begin, seed), seed) for seed in range(5)]
    answered(forest, [first], 1, ALWAYS)
    answered(forest, others, 4, ALWAYS)
    computed = forest.caches["target"].model.computed_paths
    assert sum(len(path) <= 200 for path in computed) == num_computed
    check_as_alone([first, *others])


def test_a_request_that_cannot_be_decoded_is_refused_and_leaves_nothing() -> None:
    forest = shared()
    bad = Asked({"strategy": "sample", "top_k": 0}, (), 0)
    with pytest.raises(DecodingError, match="no token"):
        forest.join(bad.request())
    assert forest.num_live == 0
    good = Asked(OPTIONS[0], (1, 2), 1)
    answered(forest, [good], 1, ALWAYS)
    check_as_alone([good])


def test_a_failing_engine_ends_those_in_the_call_and_nobody_after_them() -> None:
    target = Watched(TableModel(VOCAB, TARGET), failing_call=3)
    forest = BatchedDecoder(target, TableModel(VOCAB, DRAFT))
    doomed = asked(seed=2, num_requests=3)
    for request in doomed:  # none may have ended before the call that fails
        request.options = {**request.options, "min_new_tokens": 9}
    members = [forest.join(request.request()) for request in doomed]
    ends = [p for _ in range(3) for p in forest.iterate() if isinstance(p.event, RuntimeError)]
    assert {id(p.live) for p in ends} == {id(member) for member in members}
    later = asked(seed=4, num_requests=8)
    answered(forest, later, 3, coin(1))
    check_as_alone(later)


def test_bad_numbers_end_the_request_that_they_belong_to() -> None:
    def poisoned(path: tuple[int, ...]) -> np.ndarray:
        return np.full(VOCAB, np.nan) if path[:2] == (4, 4) else TARGET(path)

    forest = BatchedDecoder(TableModel(VOCAB, poisoned), TableModel(VOCAB, DRAFT))
    good, bad = Asked(OPTIONS[0], (1, 2), 1), Asked(OPTIONS[0], (4, 4), 1)
    members = [forest.join(request.request()) for request in (good, bad)]
    ends = outcomes(forest)
    assert isinstance(ends[members[1]], ModelError)
    assert all_tokens(ends[members[0]]) == good.alone()


def test_requests_that_leave_before_they_began_leave_nothing() -> None:
    forest = shared()
    for seed in range(50):
        forest.leave(forest.join(Asked(OPTIONS[0], (1, 2, 3), seed).request()))
    assert [cache.num_views for cache in forest.caches.values()] == [0, 0]


@pytest.mark.parametrize("leaves_after", [None, 1])
@pytest.mark.parametrize("scored", [False, True])
def test_samples_of_one_prompt_compute_it_once(scored: bool, leaves_after: int | None) -> None:
    """Also if the first of them leaves half-way: another computes the rest."""
    prompt = tuple(np.random.default_rng(5).integers(5, size=PREFILL_CHUNK + 40).tolist())
    options = {"strategy": "dsbd", "num_beams": 2, "draft_length": 2}
    samples = [Asked({**options}, prompt, seed) for seed in range(4)]
    samples[0].options["prompt_logprobs"] = scored
    models = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    decoder = BatchedDecoder(*models)
    members = [decoder.join(sample.request()) for sample in samples]
    if leaves_after:
        decoder.iterate()
        decoder.leave(members[0])
    ends = outcomes(decoder)
    for member, sample in list(zip(members, samples, strict=True))[leaves_after or 0 :]:
        assert all_tokens(ends[member]) == sample.alone()
    for model in models:
        prefixes = [path for path in model.computed_paths if len(path) < len(prompt)]
        assert len(prefixes) == len(set(prefixes)) == len(prompt) - 1


def test_a_sample_that_waits_for_its_prompt_may_be_preempted() -> None:
    prompt = tuple(np.random.default_rng(6).integers(5, size=PREFILL_CHUNK + 40).tolist())
    samples = [Asked({"strategy": "dsbd", "draft_length": 2}, prompt, seed) for seed in range(2)]
    decoder = BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
    first, waiting = (decoder.join(sample.request()) for sample in samples)
    decoder.iterate()
    decoder.preempt(waiting)
    decoder.iterate()
    decoder.resume(waiting)
    ends = outcomes(decoder)
    found = [all_tokens(ends[member]) for member in (first, waiting)]
    assert found == [sample.alone() for sample in samples]
