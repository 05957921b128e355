"""Which processors need exact int8 products asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_runtime.ort.ort_module import saturates_int8_products

FLAGS = "processor : 0\nflags\t\t: fpu avx2 {}\nbugs : none\n"


@pytest.mark.parametrize(
    ("machine", "flag", "saturates"),
    [
        ("x86_64", "avx512_vnni", False),
        ("AMD64", "avx_vnni", False),
        ("x86_64", "avx512f", True),
        ("aarch64", "", False),
    ],
)
def test_x86_without_vnni_saturates(machine, flag, saturates, tmp_path: Path):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(FLAGS.format(flag))
    assert saturates_int8_products(machine, cpu_info) is saturates


def test_an_unknown_x86_is_taken_for_one_that_saturates(tmp_path: Path):
    assert saturates_int8_products("AMD64", tmp_path / "nothing here")
