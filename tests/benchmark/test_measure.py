"""Order, pairing, warm-up and clock of the measuring loop."""

from __future__ import annotations

from itertools import count

from dsbd_ort.benchmark.bench_run import BenchRun, measure, warm_up
from dsbd_ort.benchmark.machine import EnergyMeter
from tests.benchmark.fakes import FakeClock, FakePipeline

RUNS = [BenchRun(options={"strategy": name}) for name in ("sample", "greedy", "beam-sample")]
SECONDS = {"sample": 1.0, "greedy": 2.0, "beam-sample": 4.0}


class FakeCounter:
    """Counts 10 joules between every two readings."""

    name = "fake"

    def __init__(self):
        self.readings = count(0, 10)

    def joules(self):
        return float(next(self.readings))


def measured(repetitions=2, seed=10, energy=None):
    clock = FakeClock()
    pipeline = FakePipeline(clock, SECONDS)
    requests = measure(
        pipeline,
        RUNS,
        ["a", "b"],
        repetitions=repetitions,
        seed=seed,
        clock=clock,
        energy=energy or EnergyMeter([]),
    )
    return list(requests), pipeline


def test_order_turns_around_from_one_repetition_to_the_next():
    _, pipeline = measured()
    forwards, backwards = ["sample", "greedy", "beam-sample"], ["beam-sample", "greedy", "sample"]
    assert [strategy for strategy, _, _ in pipeline.requests] == forwards * 2 + backwards * 2


def test_all_runs_of_a_pair_have_the_prompt_and_the_seed_in_common_and_no_seed_comes_twice():
    _, pipeline = measured()
    pairs = [(prompt, seed) for _, prompt, seed in pipeline.requests]
    assert pairs == [p for p in [("a", 10), ("b", 11), ("a", 12), ("b", 13)] for _ in RUNS]


def test_seconds_are_those_of_the_request():
    measurements, _ = measured()
    assert len(measurements) == 2 * 2 * 3
    for measurement in measurements:
        strategy = measurement.run.split()[0]
        assert measurement.seconds == SECONDS[strategy]
        assert measurement.tokens_per_s == 4 / SECONDS[strategy]
        assert measurement.energy_joules is None


def test_energy_is_that_of_the_request():
    measurements, _ = measured(energy=EnergyMeter([FakeCounter(), FakeCounter()]))
    assert {measurement.energy_joules for measurement in measurements} == {20.0}


def test_warm_up_runs_everything_once_on_the_longest_prompt_and_is_not_measured():
    pipeline = FakePipeline(FakeClock(), SECONDS)
    done = list(warm_up(pipeline, RUNS, ["a", "longer", "b"]))
    assert done == [run.name for run in RUNS]
    assert [request[:2] for request in pipeline.requests] == [
        ("sample", "longer"),
        ("greedy", "longer"),
        ("beam-sample", "longer"),
    ]
