"""dsbd-run at a terminal, in a pipe, from stdin to stdout, and interrupted."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dsbd_ort.cli import run

CODE = "from dsbd_ort.cli import run; run()"
GREEDY = ["--strategy", "greedy", "--eos-token-id", "257", "--threads", "1"]
LINES = '{"prompt": "ab", "id": 1}\n\n{"prompt": 3}\n{"prompt": "c", "max_new_tokens": 2}\n'


def command(bundle, *arguments):
    return [sys.executable, "-c", CODE, str(bundle.path), *arguments, *GREEDY]


def test_at_a_terminal_one_prompt_streams_and_an_interrupted_one_has_statistics(tiny_bundle):
    primary, secondary = pty.openpty()
    arguments = ["--prompt", "ab", "--max-new-tokens", "1900", "--stats"]
    process = subprocess.Popen(
        command(tiny_bundle, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(secondary)
    assert os.read(primary, 4096).startswith(b"ab")
    assert process.poll() is None  # it goes on writing
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    os.close(primary)
    assert process.returncode == 130, errors
    assert "statistics until interrupted" in errors
    found = re.search(r"num_output_tokens\W+(\d+)", errors)
    assert found and 1 <= int(found[1]) < 1900


def test_in_a_pipe_one_prompt_is_printed_when_it_is_done(tiny_bundle):
    arguments = ["--prompt", "ab", "--max-new-tokens", "20"]
    printed = [
        subprocess.check_output(command(tiny_bundle, *arguments, *more))
        for more in ([], ["--stream"])
    ]
    assert printed[0] == printed[1] and printed[0].startswith(b"ab")


WORDS = "é — 你好 😀"


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii", "utf-16"])
def test_pipes_get_utf_8_whatever_the_locale_says(tiny_bundle, tmp_path, encoding):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "ab", "id": WORDS}), encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    one = ["--prompt", WORDS, "--max-new-tokens", "3"]
    for arguments in (
        one,
        [*one, "--stream"],
        ["--input", str(tmp_path / "in.jsonl"), "--output", "-", "--max-new-tokens", "3"],
    ):
        done = subprocess.run(
            command(tiny_bundle, *arguments), capture_output=True, env=environment, check=True
        )
        assert WORDS.encode() in done.stdout
    missing = tmp_path / WORDS
    done = subprocess.run(
        command(tiny_bundle, "--prompt-file", str(missing)), capture_output=True, env=environment
    )
    assert done.returncode == 2 and str(missing).encode() in done.stderr


def test_characters_that_a_terminal_lacks_are_replaced(tiny_bundle):
    primary, secondary = pty.openpty()
    done = subprocess.run(
        command(tiny_bundle, "--prompt", WORDS, "--max-new-tokens", "3"),
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=secondary,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    os.close(secondary)
    assert WORDS.encode("latin-1", "replace") in os.read(primary, 4096)
    os.close(primary)
    assert done.returncode == 0


@pytest.mark.parametrize("more", [["--stream"], ["--json"]])
def test_a_reader_that_has_had_enough_ends_it_quietly(tiny_bundle, more):
    arguments = ["--prompt", "ab", "--max-new-tokens", "1500", *more]
    with subprocess.Popen(
        command(tiny_bundle, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        if "--stream" in more:
            process.stdout.read(2)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE


def test_a_batch_from_stdin_to_stdout(tiny_bundle):
    arguments = [str(tiny_bundle.path), "--input", "-", "--output", "-", "--max-new-tokens", "4"]
    done = CliRunner().invoke(run, [*arguments, *GREEDY], input=LINES)
    assert done.exit_code == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(answer["line"], answer.get("id")) for answer in answers] == [
        (1, 1),
        (3, None),
        (4, None),
    ]
    assert len(answers[0]["sequences"][0]["token_ids"]) == 4
    assert answers[1]["error"] == "prompt is 3; expected a text"
    assert len(answers[2]["sequences"][0]["token_ids"]) == 2
    assert "3 of 3 lines are done" in done.stderr


def test_a_batch_to_stdout_is_that_of_a_file(tiny_bundle, tmp_path):
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(LINES)
    texts = []
    for given in (
        ["--input", str(file), "--output", "-"],
        ["--input", "-", "--output", str(output)],
    ):
        done = CliRunner().invoke(run, [str(tiny_bundle.path), *given, *GREEDY], input=LINES)
        assert done.exit_code == 0, done.stderr
        lines = (done.stdout or output.read_text()).splitlines()
        texts.append([json.loads(line).get("sequences") for line in lines])
    assert texts[0] == texts[1] and texts[0][0]
