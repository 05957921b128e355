"""Draft policy "throughput": invisible in the output, ample where it pays, silent where not."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_ort.decoding import DecodeResult, DecodingConfig, StopState, TableModel
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import (
    CostCurve,
    Costs,
    EngineCosts,
    LearnedCosts,
    RequestCosts,
    learn_from_first_calls,
    never_falling,
)
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from tests.decoding.tables import (
    LogitsOf,
    TimedTable,
    all_tokens,
    decoded,
    ends_with,
    mixed_table,
    random_table,
    request_on,
)

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 8
TARGET = random_table(1, VOCAB)
HOSTILE = random_table(2, VOCAB)
DRAFTS = {"itself": TARGET, "decent": mixed_table(TARGET, HOSTILE, 0.8), "hostile": HOSTILE}

CHEAP_DRAFT = CostCurve((1, 8), (1e-4, 2e-4))
FREE_ROWS = EngineCosts(CostCurve((1, 64), (1e-2, 1.01e-2)), CHEAP_DRAFT)
DEAR_ROWS = EngineCosts(CostCurve((1, 64), (1e-3, 64e-3)), CHEAP_DRAFT)


def generate(
    draft: LogitsOf | None,
    seed: int,
    costs: EngineCosts = FREE_ROWS,
    experience: AcceptanceEstimator | None = None,
    stop: StopState | None = None,
    **options: object,
) -> DecodeResult:
    config = DecodingConfig(**{"max_new_tokens": 24, "eos_token_id": 7, **options})  # type: ignore[arg-type]
    clock = (lambda: 0.0) if costs else time.perf_counter
    more = {"stop": stop, "clock": clock, "costs": costs}
    more |= {} if experience is None else {"estimator": experience}
    request = request_on(config, (seed % VOCAB, 1, 0), seed, **more)
    return decoded(request, TableModel(VOCAB, TARGET), TableModel(VOCAB, draft) if draft else None)


WIDE = 300  # more candidates than are sorted whole
WIDE_TARGET = random_table(3, WIDE, spread=2.0)


def wide_run(seed: int, num_beams: int = 4, **options: object) -> DecodeResult:
    config = DecodingConfig(num_beams=num_beams, max_new_tokens=12, seed=seed, **options)  # type: ignore[arg-type]
    draft = mixed_table(WIDE_TARGET, random_table(4, WIDE), 0.8)
    request = request_on(config, (seed, 1), seed, costs=FREE_ROWS)
    return decoded(request, TableModel(WIDE, WIDE_TARGET), TableModel(WIDE, draft))


@pytest.mark.parametrize("top_p", [1e-9, 0.02, 0.05, 0.5])
def test_fewer_possible_candidates_than_beams_are_drafted_as_they_are(top_p: float) -> None:
    for seed in range(6):
        plain = wide_run(seed, strategy="beam-sample", top_p=top_p, num_return_sequences=4)
        drafted = wide_run(seed, draft_policy="throughput", top_p=top_p, num_return_sequences=4)
        assert all_tokens(drafted) == all_tokens(plain)
        if top_p == 1e-9:  # one possible continuation: one row a layer
            stats = drafted.stats
            assert stats.target_rows <= 2 + stats.num_iterations + stats.num_draft_layers


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_layer_whose_candidates_all_end_teaches_nothing(num_beams: int) -> None:
    for seed in range(6):
        stop = ends_with(*((token,) for token in range(VOCAB) if token != seed))
        check_search(seed, num_beams=num_beams, stop_strings="token 7", stop=stop)


def test_a_model_whose_every_token_ends_is_drafted_nothing() -> None:
    check_search(0, num_beams=2, eos_token_id=tuple(range(VOCAB)))


def check_search(seed: int, **options: Any) -> None:
    drafting = {"strategy": "speculative-beam-search", "draft_policy": "throughput"}
    result = generate(TARGET, seed, **drafting, **options)
    expected = generate(None, seed, strategy="beam-search", **options)
    assert all_tokens(result) == all_tokens(expected)


def long_run(draft: LogitsOf, costs: EngineCosts, **options: object) -> DecodeResult:
    options = {"num_beams": 2, "max_new_tokens": 200, "eos_token_id": None, **options}
    return generate(draft, 0, costs, draft_policy="throughput", **options)


def test_a_draft_that_is_always_right_is_drafted_to_the_limit():
    stats = long_run(TARGET, FREE_ROWS, draft_length=6).stats
    assert stats.mean_acceptance_length > 6.0


def test_rows_that_cost_nothing_are_taken_and_dear_ones_are_not():
    decent = DRAFTS["decent"]
    rows = {
        name: long_run(decent, costs).stats.target_rows
        for name, costs in (("free", FREE_ROWS), ("dear", DEAR_ROWS))
    }
    assert rows["free"] > 1.5 * rows["dear"]


def test_a_draft_that_is_never_right_is_given_up_but_tried_again():
    stats = long_run(HOSTILE, DEAR_ROWS).stats
    assert stats.num_draft_layers < 0.15 * stats.num_iterations
    later = [generate(HOSTILE, s, DEAR_ROWS, draft_policy="throughput") for s in range(3)]
    assert all(result.stats.draft_calls >= 1 for result in later)  # every request starts afresh


def test_experience_is_carried_from_request_to_request():
    experience = AcceptanceEstimator()
    options = {"num_beams": 2, "max_new_tokens": 60, "eos_token_id": None}
    for seed in range(4):
        generate(HOSTILE, seed, FREE_ROWS, experience, draft_policy="throughput", **options)
    taught = generate(HOSTILE, 9, FREE_ROWS, experience, draft_policy="throughput", **options)
    fresh = generate(HOSTILE, 9, FREE_ROWS, draft_policy="throughput", **options)
    assert 0 < taught.stats.draft_calls < fresh.stats.draft_calls


DEAR_DRAFT = EngineCosts(
    CostCurve((1, 2, 64), (9e-3, 10e-3, 54e-3)), CostCurve((1, 64), (1.8e-3, 8e-3))
)
"""A draft whose call takes a fifth of the target's: it pays where it is mostly right."""


@pytest.mark.parametrize("num_beams", [1, 2])
def test_drafts_that_lost_are_tried_the_more_rarely_and_return_where_they_agree(
    num_beams: int,
) -> None:
    experience = AcceptanceEstimator()

    options = {"draft_policy": "throughput", "num_beams": num_beams, "max_new_tokens": 64}

    def layers_of(draft: LogitsOf, seeds: range) -> list[tuple[int, int]]:
        """Return drafted and accepted layers of each request."""
        given = {**options, "eos_token_id": None}
        stats = [generate(draft, s, DEAR_DRAFT, experience, **given).stats for s in seeds]
        return [(each.num_draft_layers, each.num_accepted_layers) for each in stats]

    layers_of(lambda path: -TARGET(path), range(16))
    drafted = [drafted for drafted, _ in layers_of(lambda path: -TARGET(path), range(16, 26))]
    assert sum(drafted) < 10
    again = layers_of(TARGET, range(26, 46))
    first = next(i for i, (_, accepted) in enumerate(again) if accepted > 20)
    assert first < 15  # a try every 512 iterations, and then some
    assert min(accepted for _, accepted in again[first + 1 :]) > 30


def test_costs_are_measured_where_none_are_given():
    costs: EngineCosts | None = None
    result = generate(TARGET, 0, costs, draft_policy="throughput")  # type: ignore[arg-type]
    assert all_tokens(result) == all_tokens(generate(None, 0, strategy="beam-sample"))


def test_the_worth_of_further_layers_is_that_of_as_many_as_pay_together() -> None:
    rng = np.random.default_rng(0)
    curve = CostCurve((1, 6, 7, 64), (1e-2, 1e-2, 2e-2, 4e-2))  # rows in blocks
    costs = RequestCosts(
        EngineCosts(curve, CHEAP_DRAFT),
        lambda: 1,
        num_beams=2,
        most_rows=60,
        most_beams=8,
        has_draft_model=True,
    )
    for _ in range(50):
        policy, acceptance = object.__new__(ThroughputDraftPolicy), rng.random()
        reach, rows, call = rng.random(), int(rng.integers(0, 40)), 1e-3 * rng.random()
        limit, num_layers = int(rng.integers(0, 9)), int(rng.integers(0, 4))
        token_seconds = 0.02 * rng.random()
        powers = np.append(0.0, acceptance ** np.arange(1, 7)).cumsum()
        policy.__dict__ |= {
            "_now": SimpleNamespace(limit=limit, layers=[None] * num_layers),
            "_estimator": AcceptanceEstimator(rows=4.0 * rng.random()),
            "_costs": costs,
            "_gains_ahead": token_seconds * powers,
            "_calls_ahead": call * np.arange(7),
        }
        width = round(max(policy._estimator.rows, 2))
        gain = worth = 0.0
        for layer in range(1, min(limit - num_layers, 6) + 1):
            before, after = rows + width * (layer - 1), rows + width * layer
            gain += reach * acceptance**layer * token_seconds - call
            gain -= float(costs.target[after] - costs.target[before])
            worth = max(worth, gain)
        assert float(policy._worth_of_more(reach, rows)) == pytest.approx(worth, abs=1e-12)
        of_two = policy._worth_of_more(np.array([reach, 0.0]), slice(rows, rows + 2))
        assert of_two.tolist() == pytest.approx([worth, 0.0], abs=1e-12)


def test_experience_counts_by_gap_and_depth():
    experience = AcceptanceEstimator()
    gaps = np.array([0.01, 0.7, 5.0])
    first_guess = experience.accepted(gaps, 0)
    assert (np.diff(first_guess) > 0).all()
    for _ in range(200):
        experience.learn(gaps, 1, 0)
    experience.refresh()
    learned = experience.accepted(gaps, 0)
    assert learned[0] < 0.1 and learned[1] > 0.95 and learned[2] > 0.95
    assert experience.accepted(gaps, 1) == pytest.approx(first_guess)
    for _ in range(200):
        experience.learn(gaps, 2, 3)
    experience.refresh()
    assert experience.accepted(gaps, 5)[1] < 0.15  # pooled with guesses about smaller gaps


def test_a_draft_that_agrees_with_little_is_known_after_a_few_layers_of_any_gap() -> None:
    experience, others = AcceptanceEstimator(), np.array([0.7, 1.1, 1.8])
    before = experience.accepted(others, 0)
    for gap in (0.01, 0.15, 0.5, 2.2, 3.5, 5.0, 7.0, 9.0):
        experience.learn(np.array([gap]), 1, 0)
    experience.refresh()
    assert (experience.accepted(others, 0) < 0.5 * before).all()


def test_a_wider_gap_is_never_worse():
    enough, seen = np.array([1.0, 3.0, 1.0, 1.0]), np.array([2.0, 4.0, 4.0, 1.0])
    assert never_falling(enough, seen).tolist() == [0.5, 0.5, 0.5, 1.0]


def test_what_was_never_seen_stays_a_guess_however_long_it_runs():
    experience = AcceptanceEstimator()
    seen_gap, other_gap = np.array([0.01]), np.array([5.0])
    first_guess = experience.accepted(other_gap, 0)
    for _ in range(100_000):
        experience.learn(seen_gap, 0, 0)
    experience.refresh()
    assert experience.accepted(other_gap, 0) == pytest.approx(first_guess, abs=0.05)


class ReadingModel(TableModel):
    """A draft that reads a source of its own before its first row."""

    def __init__(self, vocab_size: int, logits_of: LogitsOf) -> None:
        super().__init__(vocab_size, logits_of)
        self.spec = dataclasses.replace(self.spec, reads_source=True)


def generate_of_source(
    seed: int, num_tokens: int, source_seconds: float, most: int
) -> DecodeResult:
    """Draft by the target itself, which reads a source of so many tokens in so many seconds."""
    costs = dataclasses.replace(
        FREE_ROWS, source=CostCurve((1, 100), (source_seconds / 100, source_seconds))
    )
    config = DecodingConfig(strategy="speculative", draft_policy="throughput", max_new_tokens=most)
    more = {"clock": lambda: 0.0, "costs": costs, "source": (1,) * num_tokens}
    models = ReadingModel(VOCAB, TARGET), ReadingModel(VOCAB, TARGET)
    return decoded(request_on(config, (0,), seed, **more), *models)


SOURCES = [  # (tokens of the source, seconds to read 100, most new tokens, whether it is drafted)
    (100, 1e-3, 24, True),
    (100, 1.0, 24, False),  # a tenth of a second would be won at most
    (100, 1.0, 2, False),
    (3, 10.0, 24, False),  # the target will be short in any case
    (100, 1e-2, 200, True),
]


@pytest.mark.parametrize(("num_tokens", "seconds", "most", "is_drafted"), SOURCES)
def test_a_source_is_read_by_the_draft_where_that_pays(num_tokens, seconds, most, is_drafted):
    for seed in range(4):
        stats = generate_of_source(seed, num_tokens, seconds, most).stats
        assert (stats.num_draft_tokens > 0) == is_drafted
        assert (stats.draft_calls > 0) == is_drafted


class SetUpTable(TimedTable):
    """A table on a device: the first call of a size and of a capacity takes 50 calls' time.

    set_up: the sizes so far.
    """

    set_up_s = 0.0

    def forward(self, forward: Forward) -> ForwardResult:
        sizes = [1 << (n - 1).bit_length() for n in (forward.num_new, 64 + self.num_rows)]
        is_new = tuple(sizes) not in vars(self).setdefault("set_up", set())
        if is_new:
            self.set_up.add(tuple(sizes))
            self._clock[0] += (seconds := 50 * self.seconds_of_row)
            self.set_up_s += seconds
        return dataclasses.replace(super().forward(forward), sets_up=is_new)


def seconds_on_a_device(draft: str, costs: Costs, num_beams: int) -> float:
    """Return the seconds of 12 requests, except those that set up the engines."""
    clock, experience = [0.0], AcceptanceEstimator()
    target = SetUpTable(VOCAB, TARGET, ON_A_DEVICE.target, clock)
    model = SetUpTable(VOCAB, DRAFTS[draft], ON_A_DEVICE.draft, clock)
    learn_from_first_calls(costs, model, clock=lambda: clock[0])
    more = {"clock": lambda: clock[0], "costs": costs, "estimator": experience}
    clock[0] = target.set_up_s = model.set_up_s = 0.0
    for seed in range(12):
        config = DecodingConfig(num_beams=num_beams, max_new_tokens=96, eos_token_id=None, seed=0)
        decoded(request_on(config, (seed % VOCAB, 1), seed, **more), target, model)
    return clock[0] - target.set_up_s - model.set_up_s


ON_A_DEVICE = EngineCosts(
    CostCurve((1, 64), (5.5e-4, 7e-4)), CostCurve((1, 64), (3.5e-4, 4e-4))
)  # a small pair on an H200 (lab/results/gpu.md)


@pytest.mark.parametrize("num_beams", [1, 2, 4])
@pytest.mark.parametrize("draft", ["itself", "decent", "hostile"])
def test_nothing_is_learned_from_the_calls_that_set_up_an_engine(draft: str, num_beams: int):
    known = seconds_on_a_device(draft, ON_A_DEVICE, num_beams)
    learned = seconds_on_a_device(draft, LearnedCosts(3 * 10**7, 10**7), num_beams)
    assert learned < 1.1 * known
