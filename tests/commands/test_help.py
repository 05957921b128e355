"""--help: every option once, under the heading of its section; examples that run as written."""

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from dsbd_ort import cli
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE, OPTION_TABLE

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
