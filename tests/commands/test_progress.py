"""Progress on stderr: lines of phases, signs of life between them, nothing of libraries."""

import io
import logging
import time
import warnings

import pytest
from rich.console import Console

from dsbd_export.progress import silenced_libraries
from dsbd_ort.commands.export import working
from dsbd_ort.commands.progress import shown_progress


def test_a_long_phase_comes_back_with_its_time():
    printed = io.StringIO()
    with shown_progress(console=Console(file=printed, width=20), silence=0.05) as report:
        time.sleep(0.1)  # nothing has begun
        report("target: capturing the graph of a model")
        deadline = time.monotonic() + 20
        while printed.getvalue().count("so far") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        report("target: capturing the graph of a model: 1 of 3 parts")
        while "parts\ntarget: capturing" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = printed.getvalue().splitlines()
    phase = "target: capturing the graph of a model"
    assert lines[0] == phase and f"{phase}: 1 of 3 parts" in lines
    assert all(line.startswith(phase) for line in lines)
    assert {line for line in lines if line.endswith("so far")} == {f"{phase}: 0 s so far"}
    time.sleep(0.1)
    assert printed.getvalue().splitlines() == lines  # nothing after its end


def test_libraries_are_silent_inside_and_as_before_outside(caplog):
    logger = logging.getLogger("transformers.models")
    with silenced_libraries():
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        logger.warning("of a library")
    assert not caplog.records
    with pytest.warns(FutureWarning, match="deprecated"):
        warnings.warn("deprecated", FutureWarning, stacklevel=1)


def test_commands_work_in_silence():
    with working():
        warnings.warn("deprecated", FutureWarning, stacklevel=1)  # an error in all tests
