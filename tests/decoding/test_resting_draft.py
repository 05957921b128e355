"""A draft whose policy rests: nothing is kept for it, and it goes on where the text is by then."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, DecodingRequest, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.result import DecodeResult
from tests.decoding.tables import (
    all_tokens,
    decoded,
    decoded_next,
    mixed_table,
    outcomes,
    prefix_of,
    random_table,
    request_on,
)

VOCAB = 12
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.85)
COSTS = EngineCosts(CostCurve((1, 8), (1e-2, 1.05e-2)), CostCurve((1, 8), (1e-4, 2e-4)))
PROMPT = tuple(np.random.default_rng(3).integers(VOCAB, size=20).tolist())
RESTS = [  # iterations that rest after so many that did not, over and over
    (1, 3),  # short ones: all that the draft needs is kept
    (1, 9),
    (4, 12),
    (3, 30),
]
PAIRS = [("speculative", "sample"), ("speculative-beam-search", "beam-search")]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[int, int]:
    """Let every policy rest by a schedule, not by its own decisions."""
    num_awake, num_to_rest = request.param
    rest = ThroughputDraftPolicy.rest

    def scheduled(self: Any) -> int:
        place = self.__dict__.setdefault("_place", 0)
        self._place = (place + 1) % (num_awake + num_to_rest)
        self._num_to_rest = max(num_awake + num_to_rest - place, 0) if place >= num_awake else 0
        return rest(self)

    monkeypatch.setattr(ThroughputDraftPolicy, "rest", scheduled)
    return num_awake, num_to_rest


def request_of(strategy: str, seed: int, **options: Any) -> DecodingRequest:
    """Return a request that drafts; the same without a draft where ``strategy`` has none."""
    common = {"num_beams": 1, "max_new_tokens": 90, "eos_token_id": None}
    known: dict[str, Any] = {}
    if strategy.startswith("speculative"):
        common["draft_policy"] = "throughput"
        known = {"costs": COSTS, "estimator": AcceptanceEstimator()}
    config = DecodingConfig(**{"strategy": strategy, **common, **options})  # type: ignore[arg-type]
    return request_on(config, PROMPT, seed, clock=lambda: 0.0, **known)


def answer(request: DecodingRequest, draft: TableModel | None = None) -> DecodeResult:
    return decoded(request, TableModel(VOCAB, TARGET), draft)


@pytest.mark.parametrize("restless", RESTS, indirect=True)
@pytest.mark.parametrize(("strategy", "plain"), PAIRS)
@pytest.mark.parametrize("drafter", ["model", "model+ngram"])
def test_a_draft_goes_on_after_a_rest_with_the_same_tokens(
    strategy: str, plain: str, drafter: str, restless: tuple[int, int]
) -> None:
    for seed in range(2):
        draft = TableModel(VOCAB, DRAFT)
        result = answer(request_of(strategy, seed, drafter=drafter), draft)
        assert all_tokens(result) == all_tokens(answer(request_of(plain, seed)))
        stats = result.stats
        assert stats.num_accepted_layers > 0 and stats.num_iterations > sum(restless)
        # No token is computed twice, whether as a prompt or by itself.
        assert len(draft.computed_paths) == len(set(draft.computed_paths))


@pytest.mark.parametrize("restless", [(4, 12)], indirect=True)
@pytest.mark.parametrize("every", [4, 5])  # calls; fewer would be those that compute rows again
def test_a_request_is_preempted_while_its_draft_rests(every: int, restless: object) -> None:
    calls = iter(range(10_000))
    request = dataclasses.replace(
        request_of("speculative", 0), preempts=lambda call: next(calls) % every == 0
    )
    expected = answer(request_of("sample", 0))
    assert all_tokens(answer(request, TableModel(VOCAB, DRAFT))) == all_tokens(expected)


@pytest.mark.parametrize("restless", [(4, 12)], indirect=True)
def test_requests_whose_drafts_rest_at_different_times_share_calls(restless: object) -> None:
    decoder = BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
    members = []
    for seed in range(4):
        members.append(decoder.join(request_of("speculative", seed)))
        for _ in range(5):
            decoder.iterate()
    results = outcomes(decoder)
    for seed, member in enumerate(members):
        expected = answer(request_of("sample", seed))
        assert all_tokens(results[member]) == all_tokens(expected)


@pytest.mark.parametrize("restless", [(1, 30)], indirect=True)
def test_a_draft_that_rests_to_the_end_leaves_its_rows_to_the_next_request(
    restless: object,
) -> None:
    decoder = BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
    request = request_of("speculative", 0, max_new_tokens=20)
    result = decoded_next(decoder, request)
    tokens = [*PROMPT, *result.sequences[0].token_ids]
    of_draft = prefix_of(decoder, "draft", tokens)
    assert len(PROMPT) <= len(of_draft.tokens) == len(of_draft.rows)
    again = decoded_next(decoder, request_of("speculative", 0))
    assert all_tokens(again) == all_tokens(answer(request_of("sample", 0)))
