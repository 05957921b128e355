"""Progress on stderr: lines of phases, signs of life between them, nothing of libraries."""

import io
import logging
import re
import time
import warnings

import pytest
from rich.console import Console

from dsbd_export.progress import silenced_libraries
from dsbd_ort import Pipeline
from dsbd_ort.commands.export import working
from dsbd_ort.commands.progress import shown_progress, slow_phases
from dsbd_runtime.phases import PHASES, phase


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


def test_a_slow_phase_of_an_opening_is_shown(capsys):
    with slow_phases(patience=0.02):
        with phase("opening the target: 2 GB"):
            deadline = time.monotonic() + 20
            shown = ""
            while not shown and time.monotonic() < deadline:
                shown += capsys.readouterr().err
                time.sleep(0.01)
        assert shown == "opening the target: 2 GB ...\n"
        assert re.fullmatch(r"opening the target: 2 GB: \d+\.\d s\n", capsys.readouterr().err)
    with slow_phases(patience=60.0), phase("opening the draft: 1 MB"):
        pass
    assert capsys.readouterr().err == "" and not PHASES.handlers


def test_an_opening_logs_its_phases(tiny_bundle, caplog, tmp_path):
    caplog.set_level(logging.INFO, logger=PHASES.name)
    options = {"num_threads": 1, "verify": True, "engine_cache": tmp_path}
    with Pipeline.from_bundle(tiny_bundle.path, **options):
        pass
    begun = [record.getMessage() for record in caplog.records if not hasattr(record, "seconds")]
    comparing = "comparing the checksums of the prepared engine"
    assert [line.partition(":")[0].replace(str(tiny_bundle.path), "B") for line in begun] == [
        "comparing the hashes of B",
        "opening the target of B",
        f"{comparing} {begun[2].split()[-1]}",
        f"preparing B/target/model.onnx in {tmp_path} for later openings",
        "opening the draft of B",
        f"{comparing} {begun[5].split()[-1]}",
        f"preparing B/draft/model.onnx in {tmp_path} for later openings",
    ]


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
