"""Energy from the kernel's powercap files and from NVML."""

from __future__ import annotations

import pytest

from dsbd_ort.benchmark.machine import EnergyMeter, NvmlCounter, energy_meter, rapl_counters


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
