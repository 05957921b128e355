"""Real exports that run out of space or are ended: nothing stays after, the next one works."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import open_bundle

EXPORT = "import sys; from dsbd_ort.cli import export; export(sys.argv[1:])"
FILE_LIMIT = 50_000  # bytes; the weights of the tiny pair are larger
LIMITED = (
    "import resource; "
    f"resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_LIMIT}, {FILE_LIMIT})); {EXPORT}"
)


def start(code: str, checkpoint: Path, output: Path) -> subprocess.Popen[str]:
    pair = ["--target", str(checkpoint), "--draft", str(checkpoint), "-o", str(output)]
    return subprocess.Popen([sys.executable, "-c", code, *pair], stderr=subprocess.PIPE, text=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_weights_that_do_not_fit(small_llama_folder, tmp_path):
    with start(LIMITED, small_llama_folder, tmp_path / "bundle") as process:
        _, lines = process.communicate()
    assert process.returncode == 2, lines
    assert "saving the graph" in lines.splitlines()[-2]
    last = lines.splitlines()[-1]
    assert last.startswith(f"Error: cannot write {tmp_path / 'bundle'}: ")
    assert last.endswith("; free some space or choose another output")
    assert names_in(tmp_path) == []


@pytest.mark.slow
def test_an_export_that_is_ended(small_llama_folder, tmp_path):
    """SIGTERM leaves nothing; files that SIGKILL leaves are gone after the next export."""
    output = tmp_path / "bundle"
    assert ended_by(signal.SIGTERM, small_llama_folder, output) == 128 + signal.SIGTERM
    assert names_in(tmp_path) == []
    assert ended_by(signal.SIGKILL, small_llama_folder, output) == -signal.SIGKILL
    assert names_in(tmp_path) != [] and not output.exists()
    folder = str(small_llama_folder)
    export_bundle(ExportConfig(target=folder, draft=folder, output=output), report=lambda _: None)
    assert names_in(tmp_path) == ["bundle"]
    open_bundle(output, verify=True)


def ended_by(number: signal.Signals, checkpoint: Path, output: Path) -> int:
    """Send a signal while the draft is worked on; return the exit code."""
    with start(EXPORT, checkpoint, output) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("draft: capturing"):
                process.send_signal(number)
    return process.returncode
