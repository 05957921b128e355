"""Every field of DecodingConfig as a command-line option."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from dsbd_ort.commands.number_types import FiniteRange, IntList
from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.decoding.option_values import Choice, Number, Whole, Wholes


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
        self.fail(f"{value!r} is none of true, false, never", param, ctx)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        help: for ``--help``.
        flag: its name where that is not the field's.
        is_multiple: whether it may be repeated.
    """

    help: str
    flag: str | None = None
    is_multiple: bool = False


OPTIONS = {
    "strategy": Option(f"one of {', '.join(STRATEGIES)}"),
    "num_beams": Option("W, beams of the output law [4; 1 for single-beam strategies]"),
    "coupling": Option("gumbel or rejection [gumbel for sampling strategies]"),
    "width_policy": Option("fixed; of dsbd also threshold [threshold for dsbd]"),
    "min_beams": Option("fewest beams that threshold keeps [half of num_beams]"),
    "accept_threshold": Option("probability of acceptance that threshold requires"),
    "draft_policy": Option("fixed or throughput: as much as pays"),
    "draft_length": Option("layers of a drafted forest [4]"),
    "draft_beams": Option("candidates of every drafted layer, or of each [num_beams]"),
    "memory": Option("forest; of dsbd also single"),
    "replacement": Option("draw beams with replacement"),
    "temperature": Option("of both models"),
    "top_k": Option("draw from the k most probable tokens; 0: from all"),
    "top_p": Option("draw from the smallest set of this probability; 1: from all"),
    "max_new_tokens": Option("longest continuation"),
    "seed": Option("same seed, same output"),
    "num_return_sequences": Option("how many of the final beams to print, best first"),
    "length_penalty": Option("rank by logprob / tokens ** length_penalty"),
    "early_stopping": Option("of beam search: true, false or never"),
    "joint_threshold": Option("of mjsd: likelihood ratio to exceed [0.1]"),
    "joint_tokens": Option("of mjgd: tokens decided jointly [4]"),
    "joint_beams": Option("of mjgd: beams that search them [4]"),
    "stop_strings": Option("end where this text comes; may be repeated", "--stop", True),
    "eos_token_id": Option("what ends a sequence [the model's own]"),
}


def option_type(name: str) -> click.ParamType[Any]:
    """Return what reads the text of an option, by the values that it takes."""
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


def decoding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one ``--kebab-case`` option per field of DecodingConfig; not given means None."""
    for field in reversed(dataclasses.fields(DecodingConfig)):
        option = OPTIONS[field.name]
        shown = "" if field.default is None else f" [{field.default}]"
        decorate = click.option(
            option.flag or "--" + field.name.replace("_", "-"),
            field.name,
            type=option_type(field.name),
            help=option.help + shown,
            multiple=option.is_multiple,
        )
        command = decorate(command)
    return command


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what was given on the command line: the fields of a DecodingConfig to be."""
    return {name: value for name, value in options.items() if value not in (None, ())}
