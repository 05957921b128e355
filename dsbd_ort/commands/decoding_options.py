"""Every field of DecodingConfig as a command-line option."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from dsbd_ort.decoding import STRATEGIES, DecodingConfig


class IntList(click.ParamType[int | tuple[int, ...]]):
    """One whole number, or several with commas between: 4 or 4,4,2."""

    name = "INT[,INT...]"

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
        self.fail(f"{value!r} is none of true, false, never", param, ctx)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        kind: what click makes of its text.
        help: for ``--help``.
        flag: its name where that is not the field's.
        is_multiple: whether it may be repeated.
    """

    kind: Any
    help: str
    flag: str | None = None
    is_multiple: bool = False


OPTIONS = {
    "strategy": Option(str, f"one of {', '.join(STRATEGIES)}"),
    "num_beams": Option(int, "W, beams of the output law [4; 1 for single-beam strategies]"),
    "coupling": Option(str, "gumbel or rejection [gumbel for sampling strategies]"),
    "width_policy": Option(str, "fixed; of dsbd also threshold [threshold for dsbd]"),
    "min_beams": Option(int, "fewest beams that threshold keeps [half of num_beams]"),
    "accept_threshold": Option(float, "probability of acceptance that threshold requires"),
    "draft_policy": Option(str, "fixed or throughput: as much as pays"),
    "draft_length": Option(int, "layers of a drafted forest [4]"),
    "draft_beams": Option(IntList(), "candidates of every drafted layer, or of each [num_beams]"),
    "memory": Option(str, "forest; of dsbd also single"),
    "replacement": Option(bool, "draw beams with replacement"),
    "temperature": Option(float, "of both models"),
    "top_k": Option(int, "draw from the k most probable tokens; 0: from all"),
    "top_p": Option(float, "draw from the smallest set of this probability; 1: from all"),
    "max_new_tokens": Option(int, "longest continuation"),
    "seed": Option(int, "same seed, same output"),
    "num_return_sequences": Option(int, "how many of the final beams to print, best first"),
    "length_penalty": Option(float, "rank by logprob / tokens ** length_penalty"),
    "early_stopping": Option(EarlyStopping(), "of beam search: true, false or never"),
    "joint_threshold": Option(float, "of mjsd: likelihood ratio to exceed [0.1]"),
    "joint_tokens": Option(int, "of mjgd: tokens decided jointly [4]"),
    "joint_beams": Option(int, "of mjgd: beams that search them [4]"),
    "stop_strings": Option(
        str, "end where this text comes; may be repeated", flag="--stop", is_multiple=True
    ),
    "eos_token_id": Option(IntList(), "what ends a sequence [the model's own]"),
}


def decoding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one ``--kebab-case`` option per field of DecodingConfig; not given means None."""
    for field in reversed(dataclasses.fields(DecodingConfig)):
        option = OPTIONS[field.name]
        shown = "" if field.default is None else f" [{field.default}]"
        decorate = click.option(
            option.flag or "--" + field.name.replace("_", "-"),
            field.name,
            type=option.kind,
            help=option.help + shown,
            multiple=option.is_multiple,
        )
        command = decorate(command)
    return command


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what was given on the command line: the fields of a DecodingConfig to be."""
    return {name: value for name, value in options.items() if value not in (None, ())}
