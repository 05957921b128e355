"""Pages of a mapped file do not count as memory for longer than they are used."""

import mmap
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsbd_export.gate.parity_engine import dropped_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEGABYTES = 16


def resident_megabytes(file: Path) -> float:
    """Memory that the mappings of a file take."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    total, is_own = 0, False
    for line in lines:
        if line.startswith("Rss:"):
            total += int(line.split()[1]) if is_own else 0
        elif "-" in line.split()[0]:
            is_own = line.endswith(str(file))
    return total / 1024


@pytest.fixture
def mapped(tmp_path):
    file = tmp_path / "weights of a model"
    np.arange(MEGABYTES * 2**17, dtype=np.int64).tofile(file)
    with file.open("rb") as opened:
        yield file, mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def test_pages_are_dropped_and_come_back(mapped):
    file, mapping = mapped
    numbers = np.frombuffer(mapping, np.int64)
    wanted = int(numbers.sum())
    assert resident_megabytes(file) == MEGABYTES
    with dropped_pages(file, period_s=0.01):
        deadline = time.monotonic() + 10
        while resident_megabytes(file) > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert resident_megabytes(file) == 0
        assert int(numbers.sum()) == wanted
    assert int(numbers.sum()) == wanted
    time.sleep(0.05)
    assert resident_megabytes(file) == MEGABYTES


def test_other_files_stay(mapped, tmp_path):
    file, mapping = mapped
    assert np.frombuffer(mapping, np.int64).sum() > 0
    with dropped_pages(tmp_path / "weights"), dropped_pages(file.with_name("weights of")):
        time.sleep(0.05)
        assert resident_megabytes(file) == MEGABYTES
