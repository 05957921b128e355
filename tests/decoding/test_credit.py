"""Credit of drafts: bounded losses, and when a draft can be afforded again."""

from __future__ import annotations

import pytest

from dsbd_ort.decoding.drafting.credit import DraftCredit


def spend_all(credit: DraftCredit, cost: float, num_iterations: int) -> float:
    """Make drafts that are never right whenever they can be paid; return what they cost."""
    lost = 0.0
    for _ in range(num_iterations):
        if credit.balance >= cost:
            credit.add(-cost)
            lost += cost
        credit.pass_iteration()
    return lost


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.45, 1.0])
def test_drafts_that_are_never_right_lose_2_percent_of_a_short_answer_and_of_any_longer(cost):
    credit, lost = DraftCredit(), 0.0
    for num_answers in range(1, 20):
        lost += spend_all(credit, cost, 64)
        assert lost <= 0.02 * 64 * num_answers + 1e-9


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.45, 1.0])
@pytest.mark.parametrize("num_before", [0, 5, 64, 300])
def test_when_a_draft_can_be_afforded_is_known_to_the_iteration(cost: float, num_before: int):
    credit = DraftCredit()
    spend_all(credit, cost, num_before)
    credit.add(-credit.balance)
    expected, found = credit.iterations_until(cost), 0
    while credit.balance < cost - 1e-9:
        credit.pass_iteration()
        found += 1
    assert expected == found
    assert credit.iterations_until(0.5 * cost) == 0


def test_what_was_won_counts_up_to_a_limit_and_a_prompt_can_be_paid_again() -> None:
    credit = DraftCredit()
    credit.begin_request(10.0, 5.0)
    credit.add(100.0)
    assert credit.balance == 8.0
    credit.add(-5.0)
    assert credit.balance == 3.0
    credit.begin_request(10.0, 0.5)
    credit.add(100.0)
    assert credit.balance == 3.5


def test_the_target_s_own_prompt_gives_credit_for_the_draft_s() -> None:
    credit = DraftCredit()
    credit.begin_request(50.0, 2.0)
    assert credit.balance == pytest.approx(0.02 * (64 + 50))
