"""Command-line options as fields of a dataclass: bounded numbers, groups, and shared options.

A command is a function of one frozen dataclass. Each field carries its click option, so that an
option is spelled once; a field may also be a group of options that make one value:

    @dataclass(frozen=True, kw_only=True)
    class InspectArguments:
        bundle: Path = argument(type=PATH)
        verify: bool = flag(help="Check the hash of every file too.")

    @command(InspectArguments)
    def inspect(arguments: InspectArguments) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from dsbd_ort.commands.one_line import OneLineCommand
from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.decoding.option_values import Choice, Number, Whole, Wholes
from dsbd_ort.engine.limits import MOST, MOST_BYTES, MOST_SECONDS
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.version import __version__

Arguments = TypeVar("Arguments")
_KEY = "command line"  # of a field's metadata


class FiniteRange(click.FloatRange):
    """click's FloatRange without NaN, which passes every comparison there."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse the option's text."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class IntList(click.ParamType[int | tuple[int, ...]]):
    """One integer, or several separated by commas: 4 or 4,4,2."""

    name = "INT[,INT...]"

    def __init__(self, least: int, most: int) -> None:
        self._each = click.IntRange(least, most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        """Parse the option's text."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a whole number or a list such as 4,4,2", param, ctx)
        numbers = tuple(self._each.convert(number, param, ctx) for number in numbers)
        return numbers[0] if len(numbers) == 1 else numbers


class EarlyStopping(click.ParamType[bool | str]):
    """The three values of transformers' early_stopping."""

    name = "true|false|never"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> bool | str:
        """Parse the option's text."""
        values: dict[Any, bool | str] = {"true": True, "false": False, "never": "never"}
        if value in values:
            return values[value]
        self.fail(f"{value!r} is not one of true, false, never", param, ctx)


COUNT = click.IntRange(1, MOST)
COUNT_OR_NONE = click.IntRange(0, MOST)
BYTES = click.IntRange(1, MOST_BYTES)
SECONDS = FiniteRange(0, MOST_SECONDS, min_open=True)
SECONDS_OR_NONE = FiniteRange(0, MOST_SECONDS)
WHOLE_SECONDS = click.IntRange(1, MOST_SECONDS)
TOLERANCE = FiniteRange(max=1e6)
PATH = click.Path(path_type=Path)


class _Parameter(Protocol):
    """The command-line side of one field."""

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a command's function with the click parameters of the field ``name``."""

    def value(self, name: str, values: dict[str, Any]) -> Any:
        """Return the field's value from the values of all parameters."""


@dataclasses.dataclass(frozen=True)
class _Single:
    flags: tuple[str, ...] | None  # None: an argument, by its position
    settings: dict[str, Any]

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.flags is None:
            return click.argument(name, **self.settings)(function)
        flags = self.flags or ("--" + name.replace("_", "-"),)
        return click.option(*flags, name, **self.settings)(function)

    def value(self, name: str, values: dict[str, Any]) -> Any:
        return values[name]


@dataclasses.dataclass(frozen=True)
class _Group:
    make: Callable[..., Any]
    fixed: dict[str, Any]
    members: dict[str, _Parameter]

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for member in reversed(self.members):
            function = self.members[member].add(member, function)
        return function

    def value(self, name: str, values: dict[str, Any]) -> Any:
        given = {n: member.value(n, values) for n, member in self.members.items()}
        return self.make(**self.fixed, **given)


def option(*flags: str, **settings: Any) -> Any:
    """Return a field with an option, --its-name without ``flags``; settings as of click.option."""
    default = settings.get("default", False if settings.get("is_flag") else None)
    return dataclasses.field(default=default, metadata={_KEY: _Single(flags, settings)})


def flag(*flags: str, **settings: Any) -> Any:
    """Return a field that is False unless its flag is given."""
    return option(*flags, is_flag=True, **settings)


def no_flag(*flags: str, **settings: Any) -> Any:
    """Return a field that is True unless its flag, such as --no-prefix-cache, is given."""
    return option(*flags, is_flag=True, flag_value=False, default=True, **settings)


def argument(**settings: Any) -> Any:
    """Return a field with a positional argument; settings as of click.argument."""
    return dataclasses.field(metadata={_KEY: _Single(None, settings)})


def group(make: Callable[..., Any], fixed: dict[str, Any] | None = None, /, **members: Any) -> Any:
    """Return a field whose value is ``make(**fixed, **members)``; members are fields of the above.

    Where ``make`` is a dataclass, members take their defaults from its fields.
    """
    parameters: dict[str, _Parameter] = {n: field.metadata[_KEY] for n, field in members.items()}
    for name, parameter in parameters.items():
        default = getattr(make, name, None)
        if isinstance(parameter, _Single) and default is not None:
            parameter.settings.setdefault("default", default)
    return dataclasses.field(metadata={_KEY: _Group(make, fixed or {}, parameters)})


def command(
    arguments: type[Arguments], **settings: Any
) -> Callable[[Callable[[Arguments], None]], click.Command]:
    """Make a function of ``arguments`` a command with the options that its fields carry."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(arguments)  # type: ignore[arg-type]

    def decorate(function: Callable[[Arguments], None]) -> click.Command:
        @functools.wraps(function)
        def callback(**values: Any) -> None:
            function(arguments(**{f.name: f.metadata[_KEY].value(f.name, values) for f in fields}))

        decorated: Callable[..., Any] = callback
        for field in reversed(fields):
            decorated = field.metadata[_KEY].add(field.name, decorated)
        decorated = click.version_option(__version__)(decorated)
        return click.command(cls=OneLineCommand, **settings)(decorated)

    return decorate


def given_flags(context: click.Context) -> dict[str, str]:
    """Return the parameters given on the command line: the long flag by the parameter's name."""
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name
        and parameter.expose_value
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def pipeline_settings(**fixed: Any) -> Any:
    """Return a field of PipelineSettings; ``fixed`` are those that have no option."""
    options = {
        "bundle": argument(type=PATH),
        "provider": option(show_default=True, help="Execution provider."),
        "draft_provider": option(help="Execution provider of the draft [that of the target]."),
        "num_threads": option(
            "--threads", type=COUNT, help="Threads of the target, and of a large draft."
        ),
        "cuda_graphs": flag(help="On cuda: capture each size of call once and replay it."),
        "verify": flag(help="Check the hash of every file first."),
        "prefix_cache": no_flag(
            "--no-prefix-cache", help="Do not reuse cache rows of earlier prompts."
        ),
    }
    members = {name: field for name, field in options.items() if name not in fixed}
    return group(PipelineSettings, fixed, **members)


OPTIONS = {
    "strategy": f"one of {', '.join(STRATEGIES)}",
    "num_beams": "W, beams of the output [4; 1 for single-beam strategies]",
    "coupling": "gumbel or rejection [gumbel for sampling strategies]",
    "width_policy": "fixed; of dsbd also threshold [threshold for dsbd]",
    "min_beams": "fewest beams that threshold keeps [half of num_beams]",
    "accept_threshold": "probability of acceptance that threshold requires",
    "draft_policy": "fixed, or throughput: as much as is expected to pay",
    "draft_length": "layers of a drafted forest [4]",
    "draft_beams": "candidates of every drafted layer, or of each [num_beams]",
    "memory": "forest; of dsbd also single",
    "replacement": "draw beams with replacement",
    "temperature": "of both models",
    "top_k": "draw from the k most probable tokens; 0: from all",
    "top_p": "draw from the smallest set of this probability; 1: from all",
    "max_new_tokens": "longest continuation",
    "seed": "same seed, same output",
    "num_return_sequences": "how many of the final beams to print, best first",
    "length_penalty": "rank by logprob / tokens ** length_penalty",
    "early_stopping": "of beam search: true, false or never",
    "joint_threshold": "of mjsd: likelihood ratio to exceed [0.1]",
    "joint_tokens": "of mjgd: tokens decided jointly [4]",
    "joint_beams": "of mjgd: beams that search them [4]",
    "stop_strings": "end at this text; may be repeated",
    "eos_token_id": "token ids that end a sequence [the model's own]",
    "top_logprobs": "most probable tokens to tell with every new one, in the JSON",
    "prompt_logprobs": "tell the log-probabilities of the prompt's tokens, in the JSON",
    "skip_special_tokens": "leave special tokens out of the text",
}
"""Help of every field of DecodingConfig; the defaults that it states itself are added."""


def option_type(name: str) -> click.ParamType[Any]:
    """Return the type of a decoding option, by the values that the option accepts."""
    match OPTION_TABLE[name].domain:
        case Whole(least, most):
            return click.IntRange(least, most)
        case Wholes(entry=Whole(least, most)):
            return IntList(least, most)
        case Number(least, most, is_open):
            return FiniteRange(least, most, min_open=is_open)
        case Choice((False, True)):
            return click.BOOL
        case Choice((False, True, "never")):
            return EarlyStopping()
    return click.STRING


def decoding_options() -> Any:
    """Return a field with an option per field of DecodingConfig: a dict of those given."""
    options = {}
    for field in dataclasses.fields(DecodingConfig):
        shown = "" if field.default is None else f" [{field.default}]"
        settings = {"type": option_type(field.name), "help": OPTIONS[field.name] + shown}
        if field.name == "stop_strings":
            options[field.name] = option("--stop", multiple=True, **settings)
        else:
            options[field.name] = option(**settings)
    return group(_given, **options)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, ())}
