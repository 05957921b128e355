"""Wheels in parts, and what a machine lacks."""

from __future__ import annotations

import dataclasses

import pytest

from lab.gpu.environment import join_parts, missing_requirements, wheel_names
from lab.gpu.runner import PieceError
from lab.gpu.settings import Settings

PARTS = {"a-1.whl.part-00": b"one", "a-1.whl.part-01": b"two", "b-1.whl": b"whole", "notes": b""}


def filled(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_parts_are_put_together_in_order(tmp_path):
    folder, output = filled(tmp_path / "wheels", PARTS), filled(tmp_path / "joined", {})
    assert wheel_names(folder) == {"a-1.whl", "b-1.whl"}
    assert [wheel.name for wheel in join_parts(folder, output)] == ["a-1.whl"]
    assert (output / "a-1.whl").read_bytes() == b"onetwo"


def test_a_missing_part_is_named(tmp_path):
    folder = filled(tmp_path / "wheels", {"a-1.whl.part-00": b"", "a-1.whl.part-02": b""})
    with pytest.raises(PieceError, match=r"a-1\.whl lacks part 01"):
        join_parts(folder, tmp_path)


def no_driver(name):
    raise OSError(f"{name}: cannot open shared object file")


def test_a_bare_machine_lacks_the_driver_and_both_packages(tmp_path):
    settings = Settings(work=tmp_path, wheels=filled(tmp_path / "wheels", PARTS))
    lines = missing_requirements(settings, no_driver)
    words = ("no NVIDIA driver: libcuda.so.1", "onnxruntime-gpu", "cuda-bindings")
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line and "\n" not in line
    assert missing_requirements(dataclasses.replace(settings, provider="cpu"), no_driver) == []


def test_a_package_is_there_as_wheel_in_parts_or_in_other_site_packages(tmp_path):
    wheels = filled(tmp_path / "wheels", {"onnxruntime_gpu-1.31.1-cp312.whl.part-00": b""})
    site_packages = filled(tmp_path / "site", {"cuda_bindings-13.5.0.dist-info": b""})
    settings = Settings(work=tmp_path, wheels=wheels, site_packages=site_packages)
    assert missing_requirements(settings, lambda name: None) == []
