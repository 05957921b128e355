"""Cost of a draft model that disagrees, under "throughput", on a clock.

The draft's prompt, the tokens it catches up with and the loop's own time included; costs are those
of a small chat model with a draft a tenth its size, whose loop takes a tenth of a call.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from dsbd_ort.decoding import (
    DecodingConfig,
)
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, LearnedCosts
from dsbd_ort.decoding.drafting.measured_costs import learn_from_first_calls
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from tests.decoding.tables import TimedTable, decoded, request_on
from tests.decoding.test_throughput import DRAFTS, TARGET, VOCAB

TARGET_CURVE = CostCurve((1, 2, 64), (9.3e-3, 10.4e-3, 54e-3))
DRAFT_CURVE = CostCurve((1, 64), (1.5e-3, 8e-3))
ITERATION, LAYER, THOUGHT, RESTING = 1e-3, 1e-3, 1e-4, 5e-5  # seconds of the loop
NUM_TOKENS, PROMPT = 64, 48


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock on which the loop takes time as well: more where a draft is thought about or made."""
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


def ratios(
    draft: str,
    num_beams: int,
    num_answers: int,
    clock: list[float],
    draft_bytes: int = 20_000_000,
) -> list[float]:
    """Return how many times as long as without a draft each answer of a process takes."""
    experience = AcceptanceEstimator()
    costs = LearnedCosts(target_bytes=140_000_000, draft_bytes=draft_bytes)
    opened = TimedTable(VOCAB, DRAFTS[draft], DRAFT_CURVE, clock, opening=2e-2)
    learn_from_first_calls(costs, opened, clock=lambda: clock[0])
    rows = TARGET_CURVE.up_to(64)
    plain = float(rows[PROMPT - 1] + rows[1] + (NUM_TOKENS - 1) * rows[num_beams])
    plain += NUM_TOKENS * ITERATION
    beams = {"strategy": "dsbd", "num_beams": num_beams} if num_beams > 1 else {}
    config = DecodingConfig(
        **{"strategy": "speculative"} | beams,  # type: ignore[arg-type]
        draft_policy="throughput",
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
    )
    more = {"clock": lambda: clock[0], "costs": costs, "estimator": experience}
    found = []
    for seed in range(num_answers):
        began = clock[0]
        prompt = tuple((seed + place * place) % VOCAB for place in range(PROMPT))
        decoded(
            request_on(config, prompt, seed, **more),
            TimedTable(VOCAB, TARGET, TARGET_CURVE, clock),
            TimedTable(VOCAB, DRAFTS[draft], DRAFT_CURVE, clock),
        )
        found.append((clock[0] - began) / plain)
    return found


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_a_draft_that_agrees_with_little_costs_at_most_3_percent(
    num_beams: int, clock: list[float]
) -> None:
    found = ratios("hostile", num_beams, 8, clock)
    assert found[0] < 1.031  # the first answer of a process, of which nothing is known
    assert sum(found[:4]) < 4 * 1.031
    assert sum(found[4:]) < 4 * 1.015  # drafts have lost before, so that they are hardly tried


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_draft_that_agrees_is_used_from_the_first_answer_on(
    num_beams: int, clock: list[float]
) -> None:
    found = ratios("itself", num_beams, 4, clock)
    assert found[0] < 0.8 and max(found[1:]) < 0.75


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
