"""Order, pairing, warm-up, clock and energy of the measuring loop."""

from itertools import count

import pytest

from dsbd_ort.benchmark.bench_run import BenchRun, measure, warm_up
from dsbd_ort.benchmark.machine import EnergyMeter, NvmlCounter, energy_meter, rapl_counters
from tests.benchmark.fakes import FakeClock, FakePipeline

RUNS = [BenchRun(options={"strategy": name}) for name in ("sample", "greedy", "beam-sample")]
SECONDS = {"sample": 1.0, "greedy": 2.0, "beam-sample": 4.0}


class FakeCounter:
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


def write_package(powercap, name, energy_uj, range_uj=10_000_000):
    folder = powercap / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")


def test_packages_are_added_up_and_their_parts_are_not(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1"):
        write_package(tmp_path, name, 1_000_000)
    meter = energy_meter(["cpu"], tmp_path)
    assert meter.names == ["rapl intel-rapl:0", "rapl intel-rapl:1"]
    before = meter.joules()
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1"):
        write_package(tmp_path, name, 3_500_000)
    assert meter.joules_since(before) == pytest.approx(5.0)


def test_a_counter_that_wraps_around_goes_on(tmp_path):
    write_package(tmp_path, "intel-rapl:0", 9_000_000, range_uj=9_999_999)
    (counter,) = rapl_counters(tmp_path)
    write_package(tmp_path, "intel-rapl:0", 500_000, range_uj=9_999_999)
    assert counter.joules() == pytest.approx(1.5)


@pytest.mark.parametrize("damage", ["absent", "no number"])
def test_without_a_readable_counter_nothing_is_measured(tmp_path, damage):
    if damage == "no number":
        write_package(tmp_path, "intel-rapl:0", "?")
    meter = energy_meter(["cpu"], tmp_path)
    assert meter.names == [] and meter.joules() is None and meter.joules_since(None) is None


class FakeNvml:
    millijoules = 5000

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"device {index}"

    def nvmlDeviceGetName(self, device):
        return "H200"

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        assert device == "device 0"
        return self.millijoules


def test_a_gpu_counts_millijoules():
    nvml = FakeNvml()
    meter = EnergyMeter([NvmlCounter(nvml)])
    assert meter.names == ["nvml 0: H200"]
    before = meter.joules()
    nvml.millijoules = 6500
    assert meter.joules_since(before) == pytest.approx(1.5)
