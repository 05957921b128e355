"""dsbd-run --cluster before there is a cluster: what is refused, and what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from dsbd_ort.cli import run

REFUSED = [
    (["--cluster", "auto"], "--cluster needs --input"),
    (
        ["--input", "in", "--output", "out", "--replicas", "2"],
        "--replicas needs --cluster",
    ),
    (
        ["--input", "in", "--output", "out", "--cluster", "auto", "--workers", "2"],
        "--cluster and --workers contradict each other",
    ),
    (["--input", "in", "--output", "out", "--cluster", "auto", "--replicas", "0"], "--replicas"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(arguments, message):
    done = CliRunner().invoke(run, ["bundle", *arguments])
    assert done.exit_code == 2 and message in done.stderr


def test_without_ray_one_line_says_what_to_install(tiny_bundle, tmp_path):
    code = "import sys; sys.modules['ray'] = None; from dsbd_ort.cli import run; run()"
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    files = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", code, tiny_bundle.path, *files, "--cluster", "auto"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "(ray)" in line and line.endswith(
        "in a checkout of dsbd-ort run: pip install -c constraints.txt -e '.[cluster]'"
    )
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(tiny_bundle, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "out").write_text("")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    code = "from dsbd_ort.cli import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code, tiny_bundle.path, *files, "--cluster", "auto"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "with --cluster it is a folder, which gets answers.jsonl" in done.stderr
