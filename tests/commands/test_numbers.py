"""No option of any command takes NaN, infinity or a number without bound, nor does a setting."""

import math

import click
import pytest
from click.testing import CliRunner

from dsbd_ort import cli
from dsbd_ort.commands.option_types import OptionText
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.generation import Gate
from dsbd_ort.openai_server.server import GracefulServer, listening_socket
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_runtime.errors import InputError

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
