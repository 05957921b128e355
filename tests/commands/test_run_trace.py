"""dsbd-run --trace: a page or its data, and what it goes together with."""

import json
import os
import pty
from functools import partial

import pytest

from dsbd_ort.cli import run
from tests.commands.calls import called, called_apart

dsbd_run = partial(called, run)
SHORT = ["--prompt", "def", "--max-new-tokens", "6", "--seed", "0"]


def test_trace_changes_nothing_that_is_printed(tiny_bundle, tmp_path):
    options = [*SHORT, "--draft-policy", "fixed", "--json"]  # the same calls, the same rounding
    plain = dsbd_run(tiny_bundle.path, *options)
    traced = dsbd_run(tiny_bundle.path, *options, "--trace", tmp_path / "trace.json")
    assert traced.exit_code == 0, traced.stderr
    sequences = json.loads(traced.stdout)["sequences"]
    assert sequences == json.loads(plain.stdout)["sequences"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = [trace["hypotheses"][beam["hypothesis"]] for beam in trace["iterations"][-1]["beams"]]
    assert sequences[0]["token_ids"][-1] in [row["token"] for row in rows]


def test_one_prompt_after_another_is_refused(tmp_path):
    here, terminal = pty.openpty()
    arguments = [tmp_path / "nowhere", "--trace", tmp_path / "trace.html"]
    done = called_apart("run", *arguments, stdin=terminal)
    os.close(here)
    os.close(terminal)
    assert done.returncode == 2 and "draws one request; give its prompt" in done.stderr


def test_html_is_a_page(tiny_bundle, tmp_path):
    done = dsbd_run(tiny_bundle.path, *SHORT, "--stream", "--trace", tmp_path / "trace.html")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "trace.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("file", "more", "words"),
    [
        ("trace.txt", SHORT, "expected a name that ends in .html"),
        ("no/trace.html", SHORT, "make it first"),
        ("trace.html", ["--input", "a", "--output", "b"], "--input and --trace contradict"),
    ],
)
def test_refusals_come_before_the_bundle_is_opened(tmp_path, file, more, words):
    done = dsbd_run(tmp_path / "nowhere", *more, "--trace", tmp_path / file)
    assert done.exit_code == 2 and words in done.stderr
