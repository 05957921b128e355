"""Options of a constraint: each kind has one, and a request takes one of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dsbd_ort.commands.option_types import PATH
from dsbd_ort.constraints import TokenTrie
from dsbd_ort.constraints.binding import TrieFiles


class FileText(click.ParamType[Any]):
    """The content of a file: its text, or what it holds as JSON."""

    name = "FILE"

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the file."""
        name = "the file" if param is None else param.opts[-1]
        try:
            text = Path(value).read_text("utf-8")
            return json.loads(text) if self._is_json else text
        except OSError as error:
            reason = error.strerror or error
            raise click.UsageError(f"{name} {value} cannot be read: {reason}", ctx) from error
        except (ValueError, RecursionError) as error:
            form = "JSON" if self._is_json else "UTF-8 text"
            raise click.UsageError(f"{name} {value} is invalid {form}: {error}", ctx) from error


class NamedTrie(click.ParamType[tuple[str, TokenTrie]]):
    """A trie read from a file, and the name that requests call it by."""

    name = "NAME=FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, TokenTrie]:
        """Read the file."""
        name, equals, file = value.partition("=")
        if not (name and equals and file):
            self.fail(f"{value!r} is not NAME=FILE, such as items=items.trie", param, ctx)
        return name, TrieFiles()(file)


def tries_by_name(
    context: click.Context, parameter: click.Parameter, values: tuple[tuple[str, TokenTrie], ...]
) -> dict[str, TokenTrie]:
    """Return the tries by their names; refuse two of one name."""
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


def constraint_given(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the constraint as plain data, None without one; raise click.UsageError for several."""
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
