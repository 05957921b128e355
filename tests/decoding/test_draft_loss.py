"""Cost of a draft model that disagrees, under "throughput", on a clock; the budget that bounds it.

Costs are those of a small chat model with a draft a tenth its size, whose loop takes a tenth of a
call; the draft's prompt and the tokens that it catches up with are included.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_ort.decoding import DecodingConfig, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator, DraftBudget
from dsbd_ort.decoding.drafting.cost_curve import (
    CostCurve,
    EngineCosts,
    LearnedCosts,
    learn_from_first_calls,
)
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.whole_requests import decoded_together
from tests.decoding.tables import TimedTable, decoded, mixed_table, request_on
from tests.decoding.test_throughput import DRAFTS, HOSTILE, TARGET, VOCAB

TARGET_CURVE = CostCurve((1, 2, 64), (9.3e-3, 10.4e-3, 54e-3))
DRAFT_CURVE = CostCurve((1, 64), (1.5e-3, 8e-3))
ITERATION, LAYER, THOUGHT, RESTING = 1e-3, 1e-3, 1e-4, 5e-5  # seconds of the loop
NUM_TOKENS, PROMPT = 64, 48


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock on which the loop takes time as well: more if a draft is planned or made."""
    now, policy = [0.0], ThroughputDraftPolicy
    rest, begin, choose, observe = policy.rest, policy.begin, policy.choose, policy.observe

    def timed_rest(self: Any) -> int:
        now[0] += RESTING
        return rest(self)

    def timed_begin(self: Any, *args: Any) -> None:
        begin(self, *args)
        now[0] += THOUGHT

    def timed_choose(self: Any, *args: Any) -> Any:
        now[0] += 0.5 * LAYER
        chosen = choose(self, *args)
        now[0] += 0.5 * LAYER
        return chosen

    def timed_observe(self: Any, iteration: Any) -> None:
        now[0] += ITERATION
        observe(self, iteration)

    monkeypatch.setattr(policy, "rest", timed_rest)
    monkeypatch.setattr(policy, "begin", timed_begin)
    monkeypatch.setattr(policy, "choose", timed_choose)
    monkeypatch.setattr(policy, "observe", timed_observe)
    yield now


class Process:
    """Answers of one process on costs that it learns, timed relative to those without a draft."""

    def __init__(
        self,
        draft: str,
        num_beams: int,
        clock: list[float],
        draft_bytes: int = 20_000_000,
        agreement: float | None = None,
    ) -> None:
        self.draft, self.clock, self.num_answers = draft, clock, 0
        self.costs = LearnedCosts(target_bytes=140_000_000, draft_bytes=draft_bytes)
        self.experience = AcceptanceEstimator.of_pair(agreement)
        opened = TimedTable(VOCAB, DRAFTS[draft], DRAFT_CURVE, clock, opening=2e-2)
        learn_from_first_calls(self.costs, opened, clock=lambda: clock[0])
        rows = TARGET_CURVE.up_to(64)
        plain = float(rows[PROMPT - 1] + rows[1] + (NUM_TOKENS - 1) * rows[num_beams])
        self.plain = plain + NUM_TOKENS * ITERATION
        beams = {"strategy": "dsbd", "num_beams": num_beams} if num_beams > 1 else {}
        self.config = DecodingConfig(
            **{"strategy": "speculative"} | beams,  # type: ignore[arg-type]
            draft_policy="throughput",
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
        )

    def answer(self, num_together: int = 1) -> float:
        """Return the seconds of an answer, or of several that share their calls, over one plain."""
        more = {"clock": lambda: self.clock[0], "costs": self.costs, "estimator": self.experience}
        began, requests = self.clock[0], []
        for _ in range(num_together):
            prompt = tuple((self.num_answers + place * place) % VOCAB for place in range(PROMPT))
            requests.append(request_on(self.config, prompt, self.num_answers, **more))
            self.num_answers += 1
        target = TimedTable(VOCAB, TARGET, TARGET_CURVE, self.clock)
        draft = TimedTable(VOCAB, DRAFTS[self.draft], DRAFT_CURVE, self.clock)
        if num_together == 1:
            decoded(requests[0], target, draft)
        else:
            decoder = BatchedDecoder(target, draft, costs=self.costs, clock=lambda: self.clock[0])
            decoded_together(decoder, requests, num_together)
        return (self.clock[0] - began) / self.plain


def ratios(
    draft: str, num_beams: int, num_answers: int, clock: list[float], **more: Any
) -> list[float]:
    """Return the time of each answer of a process, relative to that without a draft."""
    process = Process(draft, num_beams, clock, **more)
    return [process.answer() for _ in range(num_answers)]


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_a_draft_that_agrees_with_little_costs_at_most_3_percent_of_four_answers(
    num_beams: int, clock: list[float]
) -> None:
    found = ratios("hostile", num_beams, 8, clock)
    assert found[0] < 1.055  # of a process, of which nothing is known: 4 % are advanced
    assert sum(found[:4]) < 4 * 1.031
    assert sum(found[4:]) < 4 * 1.015  # drafts have lost before, so that they are hardly tried


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_draft_that_agrees_is_used_from_the_first_answer_on(
    num_beams: int, clock: list[float]
) -> None:
    found = ratios("itself", num_beams, 4, clock)
    assert found[0] < 0.8 and max(found[1:]) < 0.75


@pytest.mark.parametrize("num_beams", [2, 4])
def test_a_draft_that_only_pays_in_wide_layers_is_used(
    num_beams: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small budget would pay for narrow layers only, whose failures keep it small."""
    monkeypatch.setitem(DRAFTS, "middling", mixed_table(TARGET, HOSTILE, 0.65))
    found = ratios("middling", num_beams, 12, clock)
    assert sum(found) < 12 * {2: 0.87, 4: 0.96}[num_beams]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_drafts_that_lose_while_calls_are_shared_are_made_for_a_lone_request(
    num_beams: int, clock: list[float]
) -> None:
    """Calls of eight requests have so many rows that no draft pays; the loss is of that load."""
    process = Process("decent", num_beams, clock)
    before = [process.answer() for _ in range(4)]
    for _ in range(3):
        process.answer(num_together=8)
    after = [process.answer() for _ in range(4)]
    assert sum(after) < 1.05 * sum(before)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_pair_that_was_measured_is_drafted_for_as_it_deserves_from_the_first_answer_on(
    num_beams: int, clock: list[float]
) -> None:
    drafts = {"hostile": 0.02, "itself": 1.0}
    measured = {
        name: ratios(name, num_beams, 1, clock, agreement=drafts[name])[0] for name in drafts
    }
    unknown = {name: ratios(name, num_beams, 1, clock)[0] for name in drafts}
    assert measured["hostile"] < min(unknown["hostile"], 1.04)
    assert measured["itself"] < 1.05 * unknown["itself"]


@pytest.mark.parametrize("gained", [-1.9, -2.1])
def test_a_text_that_drafts_lost_in_does_not_take_the_advance_of_the_next_one(gained: float):
    """Unless they have lost so much that estimates are not believed."""
    budget = DraftBudget(balance=0.1, gained=gained)
    budget.advance(100.0)
    assert budget.balance == pytest.approx(4.0 if budget.believes_estimates else 0.1)


def test_a_pair_that_was_not_measured_begins_as_ever() -> None:
    known, unknown = AcceptanceEstimator.of_pair(0.5), AcceptanceEstimator.of_pair(None)
    assert (unknown.acceptance, unknown.level) == (0.7, 1.0)
    known.refresh()
    assert known.acceptance == 0.5 and (known.rates < 0.55 * unknown.rates).all()
    for estimator in (known, unknown):
        for _ in range(200):
            estimator.learn(np.array([1.0]), 0, 0)
        estimator.refresh()
    gap = np.array([1.0])
    assert known.accepted(gap, 0) == pytest.approx(unknown.accepted(gap, 0), abs=0.03)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_draft_is_used_although_its_first_call_and_layer_were_slow(
    num_beams: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large embedding of which rows are looked up, a cold engine, code that is imported."""
    choose = ThroughputDraftPolicy.choose
    imports = [1e-2]

    def slow_at_first(self: Any, *args: Any) -> Any:
        clock[0] += imports.pop() if imports else 0.0
        return choose(self, *args)

    monkeypatch.setattr(ThroughputDraftPolicy, "choose", slow_at_first)
    found = ratios("itself", num_beams, 4, clock, draft_bytes=140_000_000)
    assert found[0] < 0.85 and max(found[1:]) < 0.75


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_the_first_drafts_are_small_because_the_cost_of_their_rows_is_guessed(
    num_beams: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, rows = TimedTable.forward, []

    def watched(self: TimedTable, call: Forward) -> ForwardResult:
        if self.seconds_of_row > 5e-3 and call.num_new < PROMPT - 1:  # the target, no prompt
            rows.append(call.num_new)
        return forward(self, call)

    process = Process("itself", num_beams, clock)
    monkeypatch.setattr(TimedTable, "forward", watched)
    process.answer()
    first = next(each for each in rows if each > num_beams)
    assert first <= 8 < max(rows)


def test_the_first_token_does_not_wait_for_the_prompt_of_the_draft(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = TimedTable.forward, []

    def watched(self: TimedTable, call: Forward) -> ForwardResult:
        calls.append("target" if self.seconds_of_row > 5e-3 else "draft")
        return forward(self, call)

    process = Process("itself", 1, clock)
    process.answer()  # a first one never drafts at once
    monkeypatch.setattr(TimedTable, "forward", watched)
    process.answer()
    assert calls[:3] == ["target", "target", "draft"]  # the prompt, its last token, then a draft


@pytest.mark.parametrize(("gained", "is_drafted"), [(0.0, False), (3.0, True)])
def test_drafts_that_have_earned_go_on_although_none_is_expected_to_pay(
    gained: float, is_drafted: bool
) -> None:
    """A mean says little of the next layer, which is seen once it is drafted."""
    costs = EngineCosts(CostCurve((1, 8), (1e-2, 2e-2)), CostCurve((1, 8), (4e-3, 4e-3)))
    estimator = AcceptanceEstimator(acceptance=0.2, num_learned=50, num_chosen=50, rows=1.0)
    estimator.learn_rate(10.0, 10.0)
    budget = estimator.budget(1)
    budget.gained, budget.share = gained, 1e-9  # which buys no tries
    config = DecodingConfig(strategy="speculative", max_new_tokens=4, eos_token_id=None)
    more = {"clock": lambda: 0.0, "costs": costs, "estimator": estimator}
    request = request_on(config, (0, 1), 0, **more)
    models = [TableModel(VOCAB, TARGET), TableModel(VOCAB, TARGET)]
    assert (decoded(request, *models).stats.num_draft_layers > 0) is is_drafted


def spend_all(budget: DraftBudget, cost: float, num_iterations: int) -> float:
    """Make drafts that are never right whenever they can be paid; return what they cost."""
    lost = 0.0
    for _ in range(num_iterations):
        if budget.balance >= cost:
            budget.settle(cost, 0.0, is_try=False)
            lost += cost
        budget.pass_iteration()
    return lost


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.45, 1.0])
def test_drafts_that_are_never_right_lose_2_percent_of_a_short_answer_and_of_any_longer(cost):
    budget, lost = DraftBudget(), 0.0
    for num_answers in range(1, 20):
        lost += spend_all(budget, cost, 64)
        assert lost <= 0.02 * 64 * num_answers + 1e-9


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.45, 1.0])
def test_what_is_advanced_to_a_first_request_is_paid_back_by_the_next_ones(cost: float) -> None:
    budget, lost = DraftBudget(), 0.0
    for num_answers in range(1, 10):
        budget.advance(256.0)  # after a loss nothing is advanced
        lost += spend_all(budget, cost, 256)
        assert lost <= max(0.04, 0.02 * num_answers) * 256 + cost


def test_drafts_that_have_earned_are_advanced_the_prompt_of_the_next_request() -> None:
    budget = DraftBudget()
    budget.settle(1.0, 3.0, is_try=False)
    budget.add(-budget.balance)
    budget.begin_request(10.0, 5.0)
    budget.advance(200.0)
    assert budget.balance == pytest.approx(0.1 * 200)
    budget.advance(100.0)
    assert budget.balance == pytest.approx(0.1 * 200)


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.45, 1.0])
@pytest.mark.parametrize("num_before", [0, 5, 64, 300])
def test_when_a_draft_can_be_afforded_is_known_to_the_iteration(cost: float, num_before: int):
    budget = DraftBudget()
    spend_all(budget, cost, num_before)
    budget.add(-budget.balance)
    expected, found = budget.iterations_until(cost), 0
    while budget.balance < cost - 1e-9:
        budget.pass_iteration()
        found += 1
    assert abs(expected - found) <= 1  # rounding
    assert budget.iterations_until(0.5 * cost) == 0


def test_the_wait_for_a_try_doubles_with_each_that_fails_and_ends_with_one_that_does_not() -> None:
    budget, waits = DraftBudget(), []
    for has_paid in (False, False, False, True, True, False):
        budget.settle(0.16, float(has_paid), is_try=True)
        waits.append(budget.iterations_until(0.16, is_try=True))
        budget.add(0.16)
    assert waits == [16, 32, 64, 16, 8, 16]


def test_earnings_count_up_to_a_limit_and_a_prompt_can_be_paid_again() -> None:
    budget = DraftBudget()
    budget.begin_request(10.0, 5.0)
    budget.add(100.0)
    assert budget.balance == 8.0
    budget.add(-5.0)
    assert budget.balance == 3.0
    budget.begin_request(10.0, 0.5)
    budget.add(100.0)
    assert budget.balance == 3.5


def test_the_prompt_of_the_target_adds_to_the_budget_for_that_of_the_draft() -> None:
    budget = DraftBudget()
    budget.begin_request(50.0, 2.0)
    assert budget.balance == pytest.approx(0.02 * (64 + 50))
