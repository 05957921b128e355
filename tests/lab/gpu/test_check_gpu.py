"""The check from end to end on the CPU, what is prepared, and what a machine lacks."""

import dataclasses
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from lab.gpu.environment import install, missing_requirements, requirements, variables
from lab.gpu.families import difference
from lab.gpu.family_bundles import Case, cases, export_case
from lab.gpu.preparation import PARTS, preparing_pieces, unpack
from lab.gpu.report import BITS_COLUMNS
from lab.gpu.runner import PieceError, Runner
from lab.gpu.settings import ROOT, Settings, subjects
from tests.lab.lab_run import lab_run


def test_every_piece_runs_on_the_cpu_and_is_not_run_twice(tiny_bundle, tmp_path):
    arguments = [
        "--provider", "cpu", "--work", tmp_path, "--bundle", tiny_bundle.path,
        "--num-prompts", 1, "--max-new-tokens", 3, "--repetitions", 1, "--all",
    ]  # fmt: skip
    done = lab_run("gpu", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {r["piece"]: r for r in json.loads((tmp_path / "gpu.json").read_text())}
    assert states["parity-tiny"]["values"]["num_identical"] == 6
    assert set(states["bits-tiny"]["values"]["counts"]) == set(BITS_COLUMNS[1:])
    assert states["bits-tiny"]["values"]["counts"]["the same calls again"]["num_other_ways"] == 0
    assert len(states["caches-tiny"]["values"]["rows"][0]) == 5
    served = states["serving-tiny"]["values"]["rows"]
    assert [(row[0], row[1]) for row in served] == [
        (run, loop) for run in ("sample", "dsbd W=2") for loop in ("python", "native")
    ]
    assert "no " in states["native-tiny"]["reason"] and states["table"]["state"] == "done"
    runs = {run["name"]: run for run in states["bench-tiny"]["values"]["runs"]}
    assert runs["dsbd W=4 fixed 4x8"]["comparison"]["is_identical"]
    assert "dsbd W=2 fixed 4x4" in done.stdout and "Seconds of each piece" in done.stdout
    again = lab_run("gpu", *arguments, "--only", "parity-*", "--only", "bench-tiny")
    assert again.stdout.splitlines()[:2] == ["parity-tiny: done before", "bench-tiny: done before"]


def test_a_family_is_compared_with_the_cpu_or_has_a_reason(tmp_path):
    place = export_case(Case(family="llama", dtype="fp32"), tmp_path)
    assert difference(place, "cpu") == {
        "case": "llama fp32", "dtype": "fp32", "difference": 0.0, "reason": "",
    }  # fmt: skip
    refused = difference(place, "cuda")
    assert refused["difference"] is None and "cuda" in refused["reason"]


def test_without_a_gpu_it_says_what_is_missing(tmp_path):
    done = lab_run("gpu", "--work", tmp_path / "work", "--wheels", tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ""
    assert lines[-2:] == [
        f"no package {name} in {tmp_path}; bring its wheel, see docs/gpu.md"
        for name in ("onnxruntime-gpu", "cuda-bindings")
    ]
    assert not (tmp_path / "work").exists()


def test_a_piece_that_does_not_exist_is_refused_with_the_names_that_do(tmp_path):
    done = lab_run("gpu", "--work", tmp_path, "--only", "bench-nothing")
    assert done.returncode == 2 and "parity-demo-fp32" in done.stdout


def test_the_check_itself_needs_no_package():
    """It makes the environment that has them."""
    command = [sys.executable, "-S", "-c", "import lab.gpu.command"]
    subprocess.run(command, cwd=ROOT, env={}, check=True)


def installed(work, wheels, **options):
    settings = Settings(work=work, provider="cpu", wheels=wheels, **options)
    runner = Runner(settings.python, ROOT / "scripts", work / "log", variables(settings), 100.0)
    return settings, runner, lambda: install(settings, runner)


def test_an_environment_takes_what_needs_no_wheel_from_other_site_packages(tmp_path):
    (tmp_path / "wheels").mkdir()
    options = {"site_packages": Path(sysconfig.get_path("purelib")), "bundles": (tmp_path,)}
    settings, runner, make = installed(tmp_path, tmp_path / "wheels", **options)
    found = make()
    words = "tensorrt>=10.15: exit code 1: ERROR: No matching distribution found"
    assert found["tensorrt"].startswith(words)
    runner.module("lab.gpu.machine", "--provider", "cpu", "--json", tmp_path / "machine.json")
    assert "numpy" in json.loads((tmp_path / "machine.json").read_text())["versions"]
    assert str(settings.python) == found["python"]


def test_a_folder_without_the_wheels_fails_with_the_package_that_is_missing(tmp_path):
    (tmp_path / "wheels").mkdir()
    _, _, make = installed(tmp_path, tmp_path / "wheels")
    with pytest.raises(PieceError, match="No matching distribution found for numpy"):
        make()


def test_requirements_are_those_of_the_extra():
    assert any(line.startswith("onnxruntime-gpu[cuda,cudnn]") for line in requirements("gpu"))
    assert any(line.startswith("tokenizers") for line in requirements("cpu"))


def filled(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_what_was_prepared_is_packed_in_parts_and_a_missing_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.gpu.preparation.PART_BYTES", 20_000)
    settings = Settings(work=tmp_path / "here", provider="cpu")
    filled(tmp_path / "here" / "wheels", {"a.whl": bytes(range(256)) * 200})
    pack = preparing_pieces(settings)[-1].action
    files = pack(settings, None)["files"]
    assert files[:3] == ["part-00", "part-01", "part-02"]
    parts = tmp_path / "here" / PARTS
    unpack(parts, tmp_path / "there")
    assert (tmp_path / "there" / "wheels" / "a.whl").read_bytes() == bytes(range(256)) * 200
    (parts / "part-01").unlink()
    refused = lab_run("gpu", "--parts", parts, "--work", tmp_path / "other")
    assert refused.returncode == 2 and "lacks part-01" in refused.stderr


def test_on_webgpu_the_demo_pair_is_exported_in_its_form_and_cuda_is_left_out(tmp_path):
    listed = lab_run("gpu", "--work", tmp_path, "--provider", "webgpu", "--list")
    assert listed.stdout.split() == [
        "install", "machine",
        "export-demo-fp16", "serving-demo-fp16", "families-fp16",
        "export-demo-fp32", "serving-demo-fp32",
        "draft-demo-fp32-feature", "draft-demo-fp32-2-layers", "draft-demo-fp32-4-layers",
        "caches-demo-fp32", "caches-demo-fp16", "native-demo-fp32", "native-demo-fp16",
        "families-fp32",
        "parity-demo-fp16", "bits-demo-fp16", "parity-demo-fp32", "bits-demo-fp32", "table",
    ]  # fmt: skip
    settings = Settings(work=tmp_path, provider="webgpu")
    assert all(each.options[-2:] == ("--form", "webgpu") for each in subjects(settings))
    assert {case.options["form"] for case in cases("webgpu")} == {"webgpu"}
    wheels = filled(tmp_path / "wheels", {})
    (line,) = missing_requirements(dataclasses.replace(settings, wheels=wheels), no_driver)
    assert line.startswith(f"no package onnxruntime-ep-webgpu in {wheels}")


def no_driver(name):
    raise OSError(f"{name}: cannot open shared object file")


def test_a_bare_machine_lacks_the_driver_and_both_packages(tmp_path):
    settings = Settings(work=tmp_path, wheels=filled(tmp_path / "wheels", {}))
    words = ("no NVIDIA driver: libcuda.so.1", "onnxruntime-gpu", "cuda-bindings")
    for line, word in zip(missing_requirements(settings, no_driver), words, strict=True):
        assert word in line and "\n" not in line
    assert missing_requirements(dataclasses.replace(settings, provider="cpu"), no_driver) == []


def test_a_package_is_there_as_wheel_or_in_other_site_packages(tmp_path):
    wheels = filled(tmp_path / "wheels", {"onnxruntime_gpu-1.31.1-cp312.whl": b""})
    site_packages = filled(tmp_path / "site", {"cuda_bindings-13.5.0.dist-info": b""})
    settings = Settings(work=tmp_path, wheels=wheels, site_packages=site_packages)
    assert missing_requirements(settings, lambda name: None) == []
