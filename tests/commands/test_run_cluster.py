"""dsbd-run --cluster before there is a cluster: what is refused, and what is missing."""

import pytest

from dsbd_ort.cli import run
from tests.commands.calls import called, called_apart

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
    done = called(run, "bundle", *arguments)
    assert done.exit_code == 2 and message in done.stderr


def run_on_a_cluster(bundle, folder, **options):
    (folder / "in.jsonl").write_text('{"prompt": "x"}\n')
    files = ["--input", folder / "in.jsonl", "--output", folder / "out"]
    return called_apart("run", bundle.path, *files, "--cluster", "auto", **options)


def test_without_ray_one_line_says_what_to_install(tiny_bundle, tmp_path):
    before = "import sys; sys.modules['ray'] = None"
    done = run_on_a_cluster(tiny_bundle, tmp_path, before=before)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "(ray)" in line and line.endswith(
        "in a checkout of dsbd-ort run: pip install -c constraints.txt -e '.[cluster]'"
    )
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(tiny_bundle, tmp_path):
    (tmp_path / "out").write_text("")
    done = run_on_a_cluster(tiny_bundle, tmp_path)
    assert done.returncode == 2
    assert "with --cluster it is a folder, which gets answers.jsonl" in done.stderr
