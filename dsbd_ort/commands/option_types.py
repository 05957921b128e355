"""Types of command-line options: bounded numbers, decoding options, constraints."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dsbd_errors.text_files import text_of
from dsbd_ort.constraints import TokenTrie
from dsbd_ort.constraints.binding import TrieFiles
from dsbd_ort.decoding.errors import ConfigError
from dsbd_ort.decoding.option_table import OPTION_TABLE
from dsbd_ort.decoding.option_values import (
    Biases,
    Number,
    OneOf,
    Texts,
    TokenSequences,
    Whole,
    WholeOrName,
    Wholes,
)
from dsbd_ort.engine.limits import MOST, MOST_BYTES, MOST_SECONDS
from dsbd_ort.scorers import LanguageModel
from dsbd_runtime.typed_json import in_short

_MOST_CHOICES_SHOWN = 3


class FiniteRange(click.FloatRange):
    """click's FloatRange, but NaN is refused; click accepts it because all comparisons fail."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class OptionText(click.ParamType[Any]):
    """The value of a decoding option, read by the option's row; messages are those of Python."""

    def __init__(self, option: str) -> None:
        self._option = option
        self._domain = OPTION_TABLE[option].domain
        match self._domain:
            case Whole():
                self.name = "INTEGER"
            case WholeOrName(_, names):
                self.name = "|".join(["INTEGER", *names])
            case Wholes():
                self.name = "INT[,INT...]"
            case Number():
                self.name = "FLOAT"
            case OneOf(choices) if len(choices) <= _MOST_CHOICES_SHOWN:
                self.name = "|".join(str(choice).lower() for choice in choices)
            case TokenSequences() | Biases():
                self.name = "JSON"
            case _:
                self.name = "TEXT"

    @property
    def is_number(self) -> bool:
        return isinstance(self._domain, Whole | Wholes | Number)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        name = self._option if param is None else param.opts[-1]
        try:
            read = self._domain.read(name, self._parsed(value))
            return read[0] if isinstance(self._domain, Texts) else read  # one text per occurrence
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from error

    def _parsed(self, text: str) -> Any:
        """Return the value of a text, or the text itself if it is invalid; it is then refused."""
        match self._domain:
            case Whole() | WholeOrName():
                return _whole(text)
            case Wholes():
                return _wholes(text)
            case Number():
                with contextlib.suppress(ValueError):
                    return float(text)
            case TokenSequences() | Biases():
                with contextlib.suppress(ValueError, RecursionError):
                    return json.loads(text)
            case OneOf(choices) if True in choices:
                return {"true": True, "false": False}.get(text.lower(), text)
        return text


class JsonObjectType(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "JSON"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            self.fail(f"{in_short(value)} is invalid JSON ({error})", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f'{in_short(value)} is not a JSON object such as {{"a": 1}}', param, ctx)
        return parsed


class TokenIdsType(click.ParamType[list[int]]):
    """Token ids, separated by commas."""

    name = "INT[,INT...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        ids = _wholes(value) if isinstance(value, str) else value
        if isinstance(ids, str):
            self.fail(f"{in_short(value)} has no token ids; expected 1,2,3", param, ctx)
        return [ids] if isinstance(ids, int) else list(ids)


def _whole(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _wholes(text: str) -> int | tuple[int, ...] | str:
    numbers = [_whole(part) for part in text.split(",")]
    wholes = tuple(number for number in numbers if isinstance(number, int))
    if len(wholes) < len(numbers):
        return text
    return wholes[0] if len(wholes) == 1 else wholes


COUNT = click.IntRange(1, MOST)
COUNT_OR_NONE = click.IntRange(0, MOST)
BYTES = click.IntRange(1, MOST_BYTES)
SECONDS = FiniteRange(0, MOST_SECONDS, min_open=True)
SECONDS_OR_NONE = FiniteRange(0, MOST_SECONDS)
WHOLE_SECONDS = click.IntRange(1, MOST_SECONDS)
TOLERANCE = FiniteRange(max=1e6)
PATH = click.Path(path_type=Path)


class FileText(click.ParamType[Any]):
    """The content of a file: its text, or the value of its JSON."""

    name = "FILE"

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = "the file" if param is None else param.opts[-1]
        try:
            text = text_of(Path(value).read_bytes())
            return json.loads(text) if self._is_json else text
        except OSError as error:
            reason = error.strerror or error
            raise click.UsageError(f"{name} {value} cannot be read: {reason}", ctx) from error
        except (ValueError, RecursionError) as error:
            form = "JSON" if self._is_json else "UTF-8 text"
            raise click.UsageError(f"{name} {value} is invalid {form}: {error}", ctx) from error


class NamedTrie(click.ParamType[tuple[str, TokenTrie]]):
    """A trie read from a file, and its name in requests."""

    name = "NAME=FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, TokenTrie]:
        name, equals, file = value.partition("=")
        if not (name and equals and file):
            self.fail(f"{value!r} is not NAME=FILE, such as items=items.trie", param, ctx)
        return name, TrieFiles()(file)


def tries_by_name(
    context: click.Context, parameter: click.Parameter, values: tuple[tuple[str, TokenTrie], ...]
) -> dict[str, TokenTrie]:
    """Return the tries by their names; refuse two tries with one name."""
    tries = dict(values)
    if len(tries) < len(values):
        raise click.BadParameter("two tries have one name; rename one", context, parameter)
    return tries


def _settings(help: str, *, is_rare: bool = True, **settings: Any) -> dict[str, Any]:
    return {"help": help, "is_rare": is_rare, **settings}


CONSTRAINT_OPTIONS = {
    "json_schema": _settings(
        "JSON that fits the schema in this file.", type=FileText(is_json=True), is_rare=False
    ),
    "json_object": _settings("Any JSON object.", is_flag=True),
    "regex": _settings("Text that this regular expression matches as a whole.", metavar="REGEX"),
    "choice": _settings("One of these texts; repeat it for each.", metavar="TEXT", multiple=True),
    "grammar": _settings("Text of the Lark grammar in this file.", type=FileText(is_json=False)),
    "trie": _settings("A token sequence of this file (.trie, .npy).", type=PATH, metavar="FILE"),
}
"""The click settings of each kind of constraint."""

SCORER_OPTIONS = {
    "lm": _settings(
        "N-gram model of words whose scores are added: ARPA, or KenLM's binary form.",
        type=PATH,
        metavar="FILE",
    ),
    "lm_weight": _settings(
        "Factor of its log-probabilities [0.2].", type=FiniteRange(0, 100), metavar="FLOAT"
    ),
    "word_bonus": _settings(
        "Added for each word [1.5].", type=FiniteRange(-100, 100), metavar="FLOAT"
    ),
}
"""The click settings of a language model."""


def scorers_given(values: Mapping[str, Any]) -> list[LanguageModel]:
    """Return the scorers of ``SCORER_OPTIONS``; click.UsageError: numbers without a model.

    InputError: the file is not a language model.
    """
    numbers = {"weight": values.get("lm_weight"), "word_bonus": values.get("word_bonus")}
    given = {name: value for name, value in numbers.items() if value is not None}
    if (file := values.get("lm")) is not None:
        return [LanguageModel(file, **given)]
    if given:
        raise click.UsageError("--lm-weight and --word-bonus need --lm; add it, or leave them out")
    return []


def constraint_given(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the constraint as plain data, or None; raise click.UsageError for several."""
    given = {name: value for name, value in values.items() if value not in (None, False, ())}
    if len(given) > 1:
        first, second, *_ = ("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(
            f"{first} and {second} contradict each other: a request has one constraint; give one "
            "of them"
        )
    for name, value in given.items():
        plain = str(value.absolute()) if isinstance(value, Path) else value
        return {name: list(plain) if isinstance(plain, tuple) else plain}
    return None
