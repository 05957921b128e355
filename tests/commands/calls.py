"""Commands called in this process, and how their errors look."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import click
from click.testing import CliRunner, Result


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
