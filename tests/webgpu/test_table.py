"""The table that people send: what ``lab/run gpu --provider webgpu`` prints of a machine."""

import json

import pytest

from tests.lab.lab_run import lab_run

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]


def test_the_check_of_a_machine_runs_and_prints_its_adapter(bundle_by_head, tmp_path):
    done = lab_run(
        "gpu", "--provider", "webgpu", "--work", tmp_path, "--bundle", bundle_by_head["full"],
        "--num-prompts", 1, "--max-new-tokens", 3,
        "--only", "machine", "--only", "parity-*", "--only", "table",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        each["piece"]: each["values"] for each in json.loads((tmp_path / "gpu.json").read_text())
    }
    assert "SwiftShader" in done.stdout and "onnxruntime-ep-webgpu 0.4.0" in done.stdout
    assert found["parity-bundle"]["num_identical"] == found["parity-bundle"]["num_compared"]
    assert found["parity-bundle"]["is_within_limits"]
