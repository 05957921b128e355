"""Gains and losses of draft policy "throughput", in the seconds of calls on a clock."""

from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, TableModel
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import (
    CostCurve,
    Costs,
    EngineCosts,
    LearnedCosts,
)
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from tests.decoding.tables import LogitsOf, TimedTable, Watched, decoded, request_on
from tests.decoding.test_throughput import (
    CHEAP_DRAFT,
    DEAR_ROWS,
    DRAFTS,
    FREE_ROWS,
    HOSTILE,
    TARGET,
    VOCAB,
)

TRUE = {  # seconds of target and draft; guessed from the same sizes of weights in every case
    "free rows": FREE_ROWS,
    "dear rows": DEAR_ROWS,
    "a step": EngineCosts(CostCurve((1, 8, 9, 64), (1e-2, 1e-2, 3e-2, 4e-2)), CHEAP_DRAFT),
    "steps": EngineCosts(
        CostCurve(
            (1, 6, 7, 12, 13, 18, 19, 64),
            (1e-2,) * 2 + (1.25e-2,) * 2 + (1.5e-2,) * 2 + (1.75e-2, 3e-2),
        ),
        CHEAP_DRAFT,
    ),
    "a dear draft": EngineCosts(FREE_ROWS.target, CostCurve((1, 8), (6e-3, 7e-3))),
    "fast": EngineCosts(CostCurve((1, 64), (2e-5, 4e-5)), CostCurve((1, 64), (2e-6, 3e-6))),
}


def seconds_of(true: EngineCosts, draft: str, costs: Costs | None = None, **options: Any) -> float:
    """Return the seconds of six requests of 64 tokens, after one to learn from."""
    clock, experience, began = [0.0], AcceptanceEstimator(), 0.0
    models = (
        TimedTable(VOCAB, TARGET, true.target, clock),
        TimedTable(VOCAB, DRAFTS[draft], true.draft, clock),
    )
    more = {"costs": costs, "estimator": experience if costs else AcceptanceEstimator()}
    for seed in range(7):
        if seed == 1:
            began = clock[0]
        config = DecodingConfig(**{"num_beams": 2, "max_new_tokens": 64, "seed": seed, **options})
        request = request_on(config, (seed % VOCAB, 1), seed, clock=lambda: clock[0], **more)
        decoded(request, *models)
    return clock[0] - began


@pytest.mark.parametrize("draft", ["itself", "decent", "hostile"])
@pytest.mark.parametrize("true", TRUE)
def test_learned_costs_serve_as_well_as_known_ones(true: str, draft: str) -> None:
    """Within 10 % from the second request on, but where rows cost as much as calls: within half.

    Of a step nothing is learned where every call is beyond it: two thirds.
    """
    known = seconds_of(TRUE[true], draft, TRUE[true])
    learned = seconds_of(TRUE[true], draft, LearnedCosts(target_bytes=10**8, draft_bytes=10**7))
    assert learned < {"dear rows": 1.5, "a step": 1.67}.get(true, 1.1) * known


SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (3, 4), (4, 2), (6, 1), (6, 2), (8, 2)]


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("true", ["free rows", "a step", "steps", "a dear draft"])
def test_no_fixed_shape_is_more_than_5_percent_faster(true: str, num_beams: int) -> None:
    fixed = [
        seconds_of(
            TRUE[true], "decent", num_beams=num_beams, draft_length=length, draft_beams=width
        )
        for length, width in SHAPES
        if width >= num_beams
    ]
    chosen = seconds_of(TRUE[true], "decent", TRUE[true], num_beams=num_beams)
    assert chosen < min(fixed) / 0.95


def draft_layers_an_iteration(layer_seconds: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the layers per iteration of a perfect draft, if the loop takes so long for a layer."""
    clock, policy = [0.0], ThroughputDraftPolicy
    begin, choose = policy.begin, policy.choose

    def timed_begin(*args: Any) -> None:
        begin(*args)
        clock[0] += 2e-4

    def slow_choose(*args: Any) -> Any:
        clock[0] += layer_seconds
        return choose(*args)

    monkeypatch.setattr(policy, "begin", timed_begin)
    monkeypatch.setattr(policy, "choose", slow_choose)
    config = DecodingConfig(num_beams=2, max_new_tokens=200, seed=0)
    curves = FREE_ROWS.target, CHEAP_DRAFT
    models = [TimedTable(VOCAB, TARGET, curve, clock) for curve in curves]
    request = request_on(config, (0, 1), clock=lambda: clock[0], costs=FREE_ROWS)
    stats = decoded(request, *models).stats
    return stats.num_draft_layers / stats.num_iterations


def test_where_the_loop_is_dearer_than_the_calls_it_saves_little_is_drafted(monkeypatch) -> None:
    assert draft_layers_an_iteration(2e-2, monkeypatch) < 0.3  # a target call takes 1e-2
    monkeypatch.undo()
    assert draft_layers_an_iteration(1e-3, monkeypatch) > 2.0


WIDE_CALLS = {  # expensive rows, as on a CPU with many beams
    "much": EngineCosts(CostCurve((1, 64), (2e-2, 15e-2)), CostCurve((1, 64), (1e-3, 8e-3))),
    "all": EngineCosts(CostCurve((1, 64), (1e-2, 64e-2)), CostCurve((1, 64), (1e-3, 1e-2))),
}


def watched(table: LogitsOf) -> Watched:
    return Watched(TableModel(VOCAB, table))


def short_requests(
    draft: LogitsOf, costs: EngineCosts, num_requests: int, prompt_length: int, **options: object
) -> list[float]:
    """Return the seconds of each request by ``costs``, prompts of the target left out."""
    experience, models = AcceptanceEstimator(), [watched(TARGET), watched(draft)]
    curves = (costs.target.up_to(512), costs.draft.up_to(512))
    seconds = []
    for seed in range(num_requests):
        for model in models:
            model.keep(np.arange(0))
            model.rows_of_calls.clear()
        given = {"num_beams": 8, "max_new_tokens": 4, "seed": seed, "eos_token_id": None}
        prompt = tuple((seed + place * place) % VOCAB for place in range(prompt_length))
        more = {"clock": lambda: 0.0, "costs": costs, "estimator": experience}
        decoded(request_on(DecodingConfig(**given, **options), prompt, seed, **more), *models)
        of_target, of_draft = (model.rows_of_calls for model in models)
        seconds.append(
            float(sum(curves[0][size] for size in of_target[1:]))
            + float(sum(curves[1][size] for size in of_draft))
        )
    return seconds


@pytest.mark.parametrize("draft", ["decent", "hostile"])
@pytest.mark.parametrize("strategy", ["dsbd", "speculative-beam-search"])
@pytest.mark.parametrize("costs", WIDE_CALLS)
def test_short_wide_requests_lose_less_than_3_percent_where_drafting_does_not_pay(
    costs: str, strategy: str, draft: str
) -> None:
    """Four tokens, eight beams, a prompt of which the draft takes a quarter of the request."""
    true = WIDE_CALLS[costs]
    plain = float(true.target.up_to(8)[[1, 8, 8, 8]].sum())
    seconds = short_requests(DRAFTS[draft], true, 40, 256, strategy=strategy)
    assert sum(seconds) < 1.03 * 40 * plain


def test_short_wide_requests_gain_where_drafting_pays() -> None:
    true = WIDE_CALLS["much"]
    plain = float(true.target.up_to(8)[[1, 8, 8, 8]].sum())
    seconds = short_requests(TARGET, true, 20, 64, strategy="speculative-beam-search")
    assert sum(seconds) < 0.8 * 20 * plain


def test_a_prompt_is_read_by_the_draft_only_where_the_tokens_that_are_left_pay_for_it():
    drafted = {}
    for num_tokens in (4, 200):
        target, draft = watched(TARGET), watched(DRAFTS["decent"])
        config = DecodingConfig(num_beams=2, max_new_tokens=num_tokens, eos_token_id=None, seed=0)
        costs = EngineCosts(FREE_ROWS.target, CostCurve((1, 64), (1e-3, 64e-3)))
        prompt = tuple(place % VOCAB for place in range(101))
        decoded(request_on(config, prompt, clock=lambda: 0.0, costs=costs), target, draft)
        drafted[num_tokens] = draft.rows_of_calls
    assert drafted[4] == []  # 100 ms to read, 10 ms a call of the target that it might save
    assert drafted[200][0] == 100 and len(drafted[200]) > 20


def test_what_a_draft_would_have_brought_is_learned_without_a_row_of_the_target():
    costs = EngineCosts(CostCurve((1, 64), (1e-3, 64e-3)), CHEAP_DRAFT)
    config = DecodingConfig(num_beams=4, max_new_tokens=200, eos_token_id=None, seed=0)
    target, draft = watched(TARGET), watched(HOSTILE)
    experience = AcceptanceEstimator()
    before = experience.seen.sum()
    more = {"clock": lambda: 0.0, "costs": costs, "estimator": experience}
    decoded(request_on(config, (0, 1), **more), target, draft)
    assert len(draft.rows_of_calls) > 2 and experience.seen.sum() > before
    assert target.rows_of_calls[2:] == [4] * 199
