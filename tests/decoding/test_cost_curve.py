"""Cost curves: between, before and beyond the points, how they are measured and learned."""

import numpy as np
import pytest

from dsbd_forward.forward import ForwardResult, SourceReading
from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding.drafting.acceptance import LoopCost
from dsbd_ort.decoding.drafting.cost_curve import (
    FREE,
    LEARNED_ROWS,
    MEASURED_ROWS,
    CostCurve,
    LearnedCosts,
    LearnedCurve,
    learn_from_first_calls,
    measure_costs,
    observe_call,
)
from dsbd_ort.decoding.engine_call import EngineCall, Meter, Role
from tests.decoding.tables import TimedTable

CURVE = CostCurve((1, 3, 5), (2.0, 4.0, 5.0))


def test_seconds_lie_on_the_lines_between_the_points_and_beyond_the_last():
    assert CURVE.up_to(6) == pytest.approx([0.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5])
    assert CURVE.up_to(1) == pytest.approx([0.0, 2.0])


def test_who_shares_a_call_pays_a_share_of_it():
    assert CURVE.up_to(3, num_sharers=2) == pytest.approx([0.0, 3.0 / 2, 4.5 / 2, 5.5 / 2])


def timed(clock: list[float], per_row: float, opening: float = 0.0) -> TimedTable:
    curve = CostCurve((1, 2), (1.0 + per_row, 1.0 + 2 * per_row))
    return TimedTable(2, lambda path: np.zeros(2), curve, clock, opening)


def test_both_engines_are_measured_and_left_empty():
    clock = [0.0]
    target, draft = timed(clock, 0.5), timed(clock, 0.0)
    costs = measure_costs(target, draft, lambda: clock[0])
    assert costs.target.seconds == pytest.approx([1.0 + 0.5 * n for n in MEASURED_ROWS])
    assert costs.draft.seconds == pytest.approx([1.0] * len(MEASURED_ROWS))
    assert target.num_rows == draft.num_rows == 0


def learned(calls: list[tuple[int, float]], guess: float = 1e-3) -> LearnedCurve:
    curve = LearnedCurve(guess)
    for num_rows, seconds in calls:
        curve.learn(num_rows, seconds)
    return curve


def seconds_of(curve: LearnedCurve, most_rows: int = 64) -> np.ndarray:
    return curve.curve(1.0).up_to(most_rows)


def test_before_the_first_call_a_further_row_is_guessed_as_a_small_part_of_one() -> None:
    guessed = seconds_of(LearnedCurve(2e-3))
    assert guessed[1] == pytest.approx(2e-3)
    assert guessed[21] == pytest.approx(4e-3)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_one_call_says_how_long_a_row_takes(num_rows: int) -> None:
    seconds = 0.3 * (1 + 0.05 * (num_rows - 1))
    assert seconds_of(learned([(num_rows, seconds)]))[1] == pytest.approx(0.3)


@pytest.mark.parametrize(("start", "a_row"), [(1.0, 0.0), (1.0, 0.02), (1.0, 0.5), (0.1, 1.0)])
def test_the_true_line_is_found_from_calls_of_the_usual_sizes(start: float, a_row: float) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 30, 200).tolist()
    curve = learned([(n, (start + a_row * n) * rng.uniform(0.95, 1.05)) for n in sizes])
    found = seconds_of(curve)
    true = start + a_row * np.arange(65)
    assert found[3:30] == pytest.approx(true[3:30], rel=0.15)
    assert found[64] == pytest.approx(true[64], rel=0.35)
    assert (np.diff(found) >= 0).all()


def test_a_step_between_two_sizes_is_found() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 33, 400).tolist()
    found = seconds_of(learned([(n, 1.0 if n <= 8 else 3.0) for n in sizes]), 32)
    assert found[[2, 6, 8]] == pytest.approx([1.0] * 3, rel=0.15)
    assert found[[16, 24, 32]] == pytest.approx([3.0] * 3, rel=0.25)


def test_disturbances_and_the_first_slow_call_of_a_size_leave_the_curve_as_it_is() -> None:
    calls = [(n, 1.0 + 0.1 * n) for n in (2, 9, 20)] * 6
    disturbed = [
        (n, 40.0 * seconds if i < 3 or i % 4 == 0 else seconds)
        for i, (n, seconds) in enumerate(calls)
    ]
    assert seconds_of(learned(disturbed)) == pytest.approx(seconds_of(learned(calls)), rel=0.05)


def test_the_latest_calls_count() -> None:
    curve = learned([(n, 1.0) for n in (2, 9, 20)] * 20 + [(n, 5.0) for n in (2, 9, 20)] * 20)
    assert seconds_of(curve)[[2, 9, 20]] == pytest.approx([5.0] * 3, rel=0.15)


def test_calls_that_a_stopped_clock_timed_teach_nothing() -> None:
    curve = LearnedCurve(1e-3)
    assert not curve.learn(4, 0.0) and not curve.learn(4, float("nan")) and not curve.learn(0, 1.0)
    assert not curve.learn(LEARNED_ROWS[-1] + 1, 1.0)
    assert seconds_of(curve)[1] == pytest.approx(1e-3)


def test_an_engine_that_was_never_called_is_guessed_by_the_other() -> None:
    costs = LearnedCosts(target_bytes=4 * 10**7, draft_bytes=10**7)
    guessed = costs.now()
    assert guessed.target.seconds[0] == pytest.approx(4 * guessed.draft.seconds[0])
    costs.observe("target", 1, 8.0)
    assert costs.now().draft.seconds[0] == pytest.approx(2.0)
    costs.observe("draft", 1, 0.5)
    assert costs.now().draft.seconds[0] == pytest.approx(0.5)


def test_costs_stay_the_same_object_between_two_fits() -> None:
    costs = LearnedCosts(10**7, 10**6)
    for _ in range(32):
        costs.observe("target", 4, 1.0)
    known = costs.now()
    costs.observe("target", 4, 1.0)
    assert costs.now() is known


def test_the_first_calls_of_a_draft_say_what_it_costs_but_for_the_very_first() -> None:
    clock = [0.0]
    draft = timed(clock, 0.0, opening=9.0)
    costs = LearnedCosts(10**9, 10**9)
    learn_from_first_calls(costs, draft, clock=lambda: clock[0])
    assert costs.now().draft.seconds[0] == pytest.approx(1.0, rel=0.1)
    assert draft.num_rows == 0


def test_what_it_costs_to_read_a_prompt_is_known_before_the_first_draft() -> None:
    """A fifth of a call for each row, not a twentieth, as is guessed."""
    clock = [0.0]
    costs = LearnedCosts(10**9, 10**9)
    learn_from_first_calls(costs, timed(clock, 0.2, opening=9.0), clock=lambda: clock[0])
    assert costs.now().draft.up_to(256)[256] == pytest.approx(1.0 + 0.2 * 256, rel=0.25)


def taught_loop_cost(layer_counts: list[int], layer: float) -> LoopCost:
    """Return what is learned from many iterations of 7e-4 seconds and so much for each layer."""
    cost = LoopCost()
    for num_layers in layer_counts * 40:
        cost.learn(num_layers, 7e-4 + layer * num_layers)
    return cost


@pytest.mark.parametrize("layer", [0.0, 1e-4, 6e-4])
def test_the_loop_costs_what_it_is_found_to_cost(layer: float) -> None:
    cost = taught_loop_cost([0, 3, 1, 4, 0, 2], layer)
    assert cost.iteration == pytest.approx(7e-4, rel=0.1)
    assert cost.layer == pytest.approx(layer, rel=0.1, abs=2e-6)


def test_the_loop_cost_of_an_iteration_is_known_where_every_draft_has_one_length() -> None:
    cost = taught_loop_cost([2], 5e-3)
    assert cost.iteration + 2 * cost.layer == pytest.approx(10.7e-3, rel=0.05)


def test_a_disturbance_hardly_changes_what_the_loop_costs() -> None:
    cost = taught_loop_cost([0, 3], 4e-4)
    before = cost.iteration + 3 * cost.layer
    cost.learn(3, 20.0)
    assert cost.iteration + 3 * cost.layer < 1.2 * before


def test_before_anything_was_drafted_a_layer_costs_a_share_of_what_an_iteration_does() -> None:
    cost = taught_loop_cost([0], 0.0)
    assert cost.iteration == pytest.approx(7e-4, rel=0.02)
    assert cost.layer == pytest.approx(4.2e-4, rel=0.02)


def test_a_loop_may_take_no_time_that_the_clock_can_tell() -> None:
    cost = LoopCost()
    for _ in range(2000):
        cost.learn(1, 0.0)
    assert cost.layer == 0.0
    cost.learn(1, 2e-3)
    assert cost.layer < 1e-4  # a disturbance, as long as it is alone
    for _ in range(400):
        cost.learn(1, 2e-3)
    assert cost.iteration + cost.layer == pytest.approx(2e-3, rel=0.05)


def that_read(num_tokens: int, seconds: float, own_seconds: float) -> ForwardResult:
    logits = DenseLogits(np.zeros((0, 1), np.float32))
    return ForwardResult(logits, reading=SourceReading(num_tokens, seconds, own_seconds))


def test_what_a_draft_reads_its_source_with_is_learned_apart_from_its_rows():
    costs = LearnedCosts(target_bytes=10**9, draft_bytes=10**8, source_bytes=2 * 10**8)
    guessed = costs.now()
    assert guessed.source.seconds[0] == pytest.approx(2 * guessed.draft.seconds[0])
    meter = Meter()

    def call(role: Role, num_rows: int) -> EngineCall:
        return EngineCall(role, meter, num_rows, lambda _: None)

    for _ in range(9):
        observe_call(costs, [call("draft", 4)], 1.0, that_read(100, 0.9, 0.5))
        observe_call(costs, [call("target", 4)], 2.0, that_read(100, 1.6, 1.6))
    learned = costs.now()
    assert learned.draft.up_to(4)[4] == pytest.approx(0.1, rel=0.05)
    assert learned.target.up_to(4)[4] == pytest.approx(0.4, rel=0.05)
    assert learned.source.up_to(100)[100] == pytest.approx(0.5, rel=0.1)
    for _ in range(9):  # longer than any size that is kept
        costs.observe("source", 1000, 5.0)
    assert 2.5 < costs.now().source.up_to(1000)[1000] < 8.0


def test_a_prompt_is_no_call_of_rows_but_its_source_counts():
    costs = LearnedCosts(10**9, 10**8, 10**8)
    before = costs.now()
    call = EngineCall("draft", Meter(), 4, lambda _: None, is_prefill=True)
    observe_call(costs, [call], 9.0, that_read(10, 8.0, 8.0))
    assert costs.now().draft == before.draft
    assert costs.now().source != before.source
    without = LearnedCosts(10**9, 10**8)
    without.observe("source", 10, 8.0)
    assert without.now().source == FREE
