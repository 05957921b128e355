"""Every command: its help, its end in one line and an exit code, its numbers and settings."""

import math
import re
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from dsbd_errors import DsbdError
from dsbd_ort import cli
from dsbd_ort.commands.one_line import OneLineCommand
from dsbd_ort.commands.option_types import OptionText
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE, OPTION_TABLE
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.generation import Gate
from dsbd_ort.openai_server.server import GracefulServer, listening_socket
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_runtime.errors import InputError

COMMANDS = ["run", "bench", "inspect", "export", "serve", "distill"]
RUN_SECTIONS = [
    "Prompt",
    "Output",
    "Many prompts, one JSON object a line",
    "Speech (models that read audio)",
    "Strategy and beams",
    "Drafts and width",
    "Sampling",
    "Length and end",
    "Penalties and bans",
    "Constraint",
    "Text and log-probabilities",
    "Joint decoding (mjsd, mjgd)",
    "Translation (encoder-decoders)",
    "Engines",
    "Options",
]


def help_of(name, flag="--help"):
    return CliRunner().invoke(getattr(cli, name), [flag], terminal_width=100).stdout


def all_help_of(name):
    return help_of(name, "--help-all" if "--help-all" in help_of(name) else "--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_shown_once_and_has_a_text(name):
    text = all_help_of(name)
    for parameter in getattr(cli, name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help
            flag = re.escape(parameter.opts[-1])
            assert len(re.findall(rf"^  (?:-\w, )?{flag}(?![-\w])", text, re.MULTILINE)) == 1, flag
    assert "2147483647" not in text and "e+308" not in text and "RANGE" not in text


def test_the_options_of_a_run_stand_in_sections():
    text = all_help_of("run")
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == RUN_SECTIONS
    sampling = text[text.index("\nSampling:") : text.index("\nLength and end:")]
    assert re.findall(r"^  --([\w-]+)", sampling, re.MULTILINE) == [
        "temperature",
        "top-k",
        "top-p",
        "min-p",
        "typical-p",
        "seed",
    ]
    own_flags = {"stop_strings", "constraint", "predicted_text", *IN_PYTHON_ALONE}
    flags = [f"--{name.replace('_', '-')}" for name in OPTION_TABLE if name not in own_flags]
    assert all(flag in text for flag in [*flags, "--predicted-file"])
    assert "Which strategy: dsbd" in text


def test_the_short_help_shows_the_options_that_people_use():
    text = help_of("run")
    shown = re.findall(r"^  --([\w-]+)", text, re.MULTILINE)
    assert len(shown) <= 32 and {"num-beams", "temperature", "stop", "audio", "help-all"} <= {
        *shown
    }
    hidden = set(re.findall(r"^  --([\w-]+)", all_help_of("run"), re.MULTILINE)) - {*shown}
    assert len(hidden) > 50 and {"draft-beams", "logit-bias", "regex", "spin-us"} <= hidden


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_valid_command_lines(name):
    lines = re.findall(rf"^    (dsbd-{name} .*)$", help_of(name), re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        command = getattr(cli, name)
        with command.make_context(name, shlex.split(line)[1:]):  # raises where one is invalid
            pass


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


NO_NUMBERS = ["nan", "inf", "-inf", "Infinity", "1e400", "-1e400"]
UNBOUNDED = ("--temperature", "--joint-threshold")  # any finite number has its meaning
NUMBERS = [
    (command, parameter)
    for command in vars(cli).values()
    if isinstance(command, click.Command)
    for parameter in command.params
    if isinstance(
        parameter.type, click.types.IntParamType | click.types.FloatParamType | OptionText
    )
    and getattr(parameter.type, "is_number", True)
]


def test_every_command_has_its_options_walked_over():
    commands = {command.name for command, _ in NUMBERS}
    assert commands == {"export", "distill", "run", "bench", "serve"} and len(NUMBERS) > 50


@pytest.mark.parametrize(
    ("command", "parameter"), NUMBERS, ids=[f"{c.name}{p.opts[0]}" for c, p in NUMBERS]
)
def test_an_option_takes_finite_bounded_numbers_alone(command, parameter):
    flag = parameter.opts[0]
    is_float = parameter.type.name in ("float", "float range", "FLOAT")
    wrong = [*NO_NUMBERS, *([] if flag in UNBOUNDED else ["1e300" if is_float else str(2**200)])]
    wrong += [] if is_float else ["9" * 5000, "-" + "9" * 30]
    bundle = [] if command.name == "export" else ["nowhere"]
    for value in wrong:
        done = CliRunner().invoke(command, [*bundle, f"{flag}={value}"])
        assert done.exit_code == 2 and done.stdout == "", (value, done.output)
        assert done.stderr.count("\n") == 1 and flag in done.stderr, (value, done.stderr)


WRONG = [math.nan, math.inf, -math.inf, -1, 10**400, 1e300, "1", True, None, [1]]


def served(**settings):
    usual = {"idle_timeout_s": 1, "shutdown_timeout_s": 1.0, "max_connections": 1}
    return GracefulServer(None, None, Gate(), **{**usual, **settings})


COUNTS = ["max_new_tokens", "max_beams", "max_draft_nodes", "max_best_of", "max_prompts"]
SETTINGS = [
    *((ServiceLimits, name) for name in ("max_requests", "max_queued", "kv_bytes")),
    *((ServingSettings, name) for name in (*COUNTS, "max_prompt_tokens", "max_body_bytes")),
    *((ServingSettings, name) for name in ("body_timeout_s", "request_timeout_s")),
    *((served, name) for name in ("idle_timeout_s", "shutdown_timeout_s", "max_connections")),
    (listening_socket, "stuck_after_s"),
]


@pytest.mark.parametrize(("made", "name"), SETTINGS)
def test_a_setting_is_checked_where_it_is_made(made, name):
    others = {"model_name": "m"} if made is ServingSettings else {}
    others = {"host": "127.0.0.1", "port": 0} if made is listening_socket else others
    for value in WRONG:
        if value is None and name in ("kv_bytes", "max_prompt_tokens", "max_new_tokens"):
            continue
        with pytest.raises(InputError, match=f"^{name} is .*; expected"):
            made(**others, **{name: value})
