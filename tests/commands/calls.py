"""Commands called in this process, and how their errors look."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from dsbd_ort import cli


def called(command: click.Command, *arguments: object, text: Any = None) -> Result:
    """Call a command; ``text`` is its stdin."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments], input=text)


def called_apart(
    command: str, *arguments: object, before: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Call a command in a process of its own, which runs the code of ``before`` first."""
    code = f"{before}\nfrom dsbd_ort.cli import {command}; {command}()"
    call = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, timeout=60, **options)


def answered(bundle: Path, folder: Path, lines: list[Any], *options: object) -> list[Any]:
    """Have dsbd-run answer lines, which ``folder`` keeps, and return the answers."""
    file, output = folder / "in.jsonl", folder / "out.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = called(cli.run, bundle, "--input", file, "--output", output, *options)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in output.read_text().splitlines()]


def assert_one_line_error(done: Result, words: str) -> None:
    """Check for one line on stderr, nothing on stdout, and exit code 2."""
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    assert words in done.stderr


def assert_one_error(done: Result, words: str) -> None:
    """Check for one error, which may follow lines of progress."""
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert done.stderr.count("Error:") == 1 and "Traceback" not in done.stderr
    assert words in done.stderr
