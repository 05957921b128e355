"""Budget of drafts: bounded losses, when a draft can be afforded, tries that become rare."""

import pytest

from dsbd_ort.decoding.drafting.budget import DraftBudget


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
