"""--help: every option once, under the heading of its section; examples that run as written."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from dsbd_ort import cli
from dsbd_ort.commands.options import OPTIONS

COMMANDS = ["run", "bench", "inspect", "export", "serve", "distill"]
RUN_SECTIONS = [
    "Prompt",
    "Output",
    "Many prompts, one JSON object a line",
    "Speech (models that read audio)",
    "Strategy and beams",
    "Sampling",
    "Length and end",
    "Penalties and bans",
    "Constraint",
    "Text and log-probabilities",
    "Drafts and width (rarely needed)",
    "Joint decoding (mjsd, mjgd)",
    "Translation (encoder-decoders)",
    "Engines",
    "Options",
]


def help_of(name: str) -> str:
    return CliRunner().invoke(getattr(cli, name), ["--help"], terminal_width=100).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_shown_once_and_has_a_text(name: str) -> None:
    text = help_of(name)
    for parameter in getattr(cli, name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help
            flag = re.escape(parameter.opts[-1])
            assert len(re.findall(rf"^  (?:-\w, )?{flag}(?![-\w])", text, re.MULTILINE)) == 1, flag
    assert "2147483647" not in text and "e+308" not in text and "RANGE" not in text


def test_the_options_of_a_run_stand_in_sections() -> None:
    text = help_of("run")
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
    assert "Other decoding options" not in text  # each of OPTIONS has its section
    assert all(f"--{name.replace('_', '-')}" in text for name in OPTIONS if name != "stop_strings")
    assert "Which strategy: dsbd" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_valid_command_lines(name: str) -> None:
    lines = re.findall(rf"^    (dsbd-{name} .*)$", help_of(name), re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        command = getattr(cli, name)
        with command.make_context(name, shlex.split(line)[1:]):  # raises where one is invalid
            pass
