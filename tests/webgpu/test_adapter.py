"""The adapter without our runtime: where it comes from, and what the plug-in makes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import software_adapter
from scripts.software_adapter import Unavailable, put_in_place, variables

pytestmark = pytest.mark.webgpu

ROOT = Path(__file__).parents[2]
PROGRAM = """
import numpy as np, onnxruntime as ort, onnxruntime_ep_webgpu as plugin
ort.register_execution_provider_library("webgpu", plugin.get_library_path())
(device,) = (each for each in ort.get_ep_devices() if each.ep_name == plugin.get_ep_name())
numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
value = ort.OrtValue.ortvalue_from_shape_and_type(numbers.shape, np.float32, "webgpu", 0)
value.update_inplace(numbers)
assert np.array_equal(value.numpy(), numbers) and value.device_name() == "webgpu"
"""


def run(program, **environment):
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program]
    inherited = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=120
    )


def test_a_process_that_is_started_with_the_variables():
    """As in a shell after the command of the module."""
    done = run(PROGRAM, **variables())
    assert done.returncode == 0, done.stderr


def test_a_process_that_has_begun_finds_the_driver():
    """No LD_LIBRARY_PATH is needed, which is read when a process starts."""
    prepare = "from scripts.software_adapter import put_in_place\nput_in_place()\n"
    without = {name: "" for name in variables() if name != "LD_LIBRARY_PATH"}
    done = run(prepare + PROGRAM, LD_LIBRARY_PATH="", **without)
    assert done.returncode == 0, done.stderr


def test_the_drivers_of_this_machine_are_left_alone(monkeypatch):
    monkeypatch.setenv("DSBD_WEBGPU", software_adapter.OWN)
    monkeypatch.setenv("VK_DRIVER_FILES", "theirs.json")
    put_in_place()
    assert variables() == {}
    assert os.environ["VK_DRIVER_FILES"] == "theirs.json"


def test_reasons(monkeypatch, tmp_path):
    """Without Debian's tools; without a package of that name, as on Ubuntu."""
    monkeypatch.setenv("DSBD_WEBGPU", str(tmp_path))
    monkeypatch.setattr(software_adapter, "PACKAGE", "no-such-package")
    with pytest.raises(Unavailable, match=r"apt-get cannot give no-such-package: .*locate"):
        variables()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="there is no apt-get"):
        variables()
    assert not (tmp_path / "driver").exists()
