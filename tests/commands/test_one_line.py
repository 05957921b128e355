"""How every command ends: one line and an exit code, a traceback where it is asked for."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from dsbd_errors import DsbdError
from dsbd_ort import cli
from dsbd_ort.commands.one_line import OneLineCommand

ENDS = [  # (what the command raises, exit code, the line)
    (DsbdError("no\n bundle"), 2, "Error: no bundle\n"),
    (click.UsageError("no prompt"), 2, "Error: no prompt\n"),
    (
        OSError(28, "No space left on device", "out"),
        2,
        "Error: cannot read or write out: No space left on device\n",
    ),
    (KeyboardInterrupt(), 130, "Error: interrupted\n"),
    (
        TypeError("x"),
        1,
        "Error: internal error, TypeError: x; run again with --debug and report what it shows\n",
    ),
    (BrokenPipeError(), 141, ""),
    (SystemExit(3), 3, ""),
]


def command_that_raises(error):
    @click.command(cls=OneLineCommand)
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(("error", "exit_code", "line"), ENDS, ids=lambda value: repr(value)[:20])
def test_an_error_is_one_line_and_an_exit_code(error, exit_code, line):
    done = CliRunner().invoke(command_that_raises(error), [])
    assert (done.exit_code, done.stderr.lstrip("\n")) == (exit_code, line)


def test_debug_shows_where_an_error_comes_from():
    done = CliRunner().invoke(command_that_raises(DsbdError("no bundle")), ["--debug"])
    assert done.exit_code == 2
    assert "Traceback" in done.stderr and "in fail" in done.stderr
    assert done.stderr.endswith("Error: no bundle\n")


@pytest.mark.parametrize("name", ["run", "export", "inspect", "bench"])
def test_every_command_has_debug(name):
    command = getattr(cli, name)
    assert isinstance(command, OneLineCommand)
    assert "--debug" in CliRunner().invoke(command, ["--help"]).stdout
    arguments = ["nowhere"] if name != "export" else []
    assert "Traceback" in CliRunner().invoke(command, [*arguments, "--debug"]).stderr


def test_an_output_that_takes_nothing_is_one_line(tiny_bundle):
    code = f"from dsbd_ort.cli import inspect\ninspect([{str(tiny_bundle.path)!r}, '--json'])"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == "Error: cannot read or write the output: No space left on device\n"
