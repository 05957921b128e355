"""Command-line options as fields of a dataclass: groups, sections of the help, shared options.

A command is a function of one frozen dataclass. Each field carries its click option, so that an
option is declared once. A field may also be a group of options that together give one value:

    @dataclass(frozen=True, kw_only=True)
    class InspectArguments:
        bundle: Path = argument(type=PATH)
        verify: bool = flag(help="Check the hash of every file too.")

    @command(InspectArguments)
    def inspect(arguments: InspectArguments) -> None: ...

``section`` is the heading of an option in the command's help.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from dsbd_ort.commands.one_line import OneLineCommand, SectionedOption
from dsbd_ort.commands.option_types import (
    CONSTRAINT_OPTIONS,
    COUNT,
    COUNT_OR_NONE,
    PATH,
    SCORER_OPTIONS,
    TOLERANCE,
    FileText,
    OptionText,
    constraint_given,
    scorers_given,
)
from dsbd_ort.decoding.native_decoder import Loop
from dsbd_ort.decoding.option_row import OptionRow
from dsbd_ort.decoding.option_table import IN_PYTHON_ALONE, OPTIONS_BY_SECTION
from dsbd_ort.decoding.option_values import Texts
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import SERVER_NGRAM_POOL
from dsbd_ort.requests.prompts import SRC_LANG, TGT_LANG
from dsbd_ort.version import __version__

Arguments = TypeVar("Arguments")
_KEY = "command line"  # key in a field's metadata
_HELP_WIDTH = 100  # maximum columns of a command's help


@dataclasses.dataclass(frozen=True)
class _Single:
    """A field with one click parameter: ``add`` decorates the command's function with it."""

    flags: tuple[str, ...] | None  # None: a positional argument
    settings: dict[str, Any]

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.flags is None:
            return click.argument(name, **self.settings)(function)
        flags = self.flags or ("--" + name.replace("_", "-"),)
        return click.option(*flags, name, cls=SectionedOption, **self.settings)(function)

    def value(self, name: str, values: dict[str, Any]) -> Any:
        return values[name]


@dataclasses.dataclass(frozen=True)
class _Group:
    """A field whose value is made from several click parameters."""

    make: Callable[..., Any]
    fixed: dict[str, Any]
    members: dict[str, _Single | _Group]

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for member in reversed(self.members):
            function = self.members[member].add(member, function)
        return function

    def value(self, name: str, values: dict[str, Any]) -> Any:
        given = {n: member.value(n, values) for n, member in self.members.items()}
        return self.make(**self.fixed, **given)


def option(*flags: str, **settings: Any) -> Any:
    """Return a field with an option; without ``flags`` its flag is --field-name.

    Settings are those of click.option, ``section``, and ``is_rare`` (only --help-all shows it).
    """
    default = settings.get("default", False if settings.get("is_flag") else None)
    return dataclasses.field(default=default, metadata={_KEY: _Single(flags, settings)})


def flag(*flags: str, **settings: Any) -> Any:
    """Return a field that is False unless its flag is given."""
    return option(*flags, is_flag=True, **settings)


def no_flag(*flags: str, **settings: Any) -> Any:
    """Return a field that is True unless its flag, such as --no-prefix-cache, is given."""
    return option(*flags, is_flag=True, flag_value=False, default=True, **settings)


def argument(**settings: Any) -> Any:
    """Return a field with a positional argument; ``settings`` are those of click.argument."""
    return dataclasses.field(metadata={_KEY: _Single(None, settings)})


def group(
    make: Callable[..., Any],
    fixed: dict[str, Any] | None = None,
    /,
    *,
    record: type[Any] | None = None,
    section: str | None = None,
    **members: Any,
) -> Any:
    """Return a field whose value is ``make(**fixed, **members)``.

    record: the dataclass that has the members as fields; default: ``make``, if it is a dataclass. A
        member's type and default come from it, so that a member may be only a text, its help.
        ``option(...)`` gives further settings.
    section: heading of members without a heading.
    """
    if record is None and dataclasses.is_dataclass(make):
        record = make if isinstance(make, type) else None
    derived = {} if record is None else _derived_settings(record)
    parameters: dict[str, _Single | _Group] = {}
    for name, member in members.items():
        field = option(help=member) if isinstance(member, str) else member
        parameter: _Single | _Group = field.metadata[_KEY]
        if isinstance(parameter, _Single) and parameter.flags is not None:
            flags, usual = derived.get(name, ((), {}))
            if section is not None:
                usual = {**usual, "section": section}
            parameter = _Single(parameter.flags or flags, {**usual, **parameter.settings})
        parameters[name] = parameter
    return dataclasses.field(metadata={_KEY: _Group(make, fixed or {}, parameters)})


def _derived_settings(record: type[Any]) -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """Return flags and click settings for each field of a dataclass, from its type and default."""
    hints, derived = get_type_hints(record), {}
    for field in dataclasses.fields(record):
        name, default = field.name.replace("_", "-"), field.default
        kinds = set(get_args(hints[field.name])) or {hints[field.name]}
        flags: tuple[str, ...] = ()
        settings: dict[str, Any] = {}
        if default is not dataclasses.MISSING:
            settings = {"default": default, "show_default": default not in (None, (), "", False)}
        if kinds == {bool, type(None)}:
            flags = (f"--{name}/--no-{name}",)
        elif kinds == {bool}:
            settings |= {"is_flag": True, "show_default": False}
            if default is True:
                flags, settings["flag_value"] = (f"--no-{name}",), False
        elif get_origin(hints[field.name]) is tuple:
            settings["multiple"] = True
        elif kind := next((kind for kind in _TYPES if kind in kinds), None):
            settings["type"] = _TYPES[kind]
        derived[field.name] = (flags, settings)
    return derived


_TYPES: dict[type, click.ParamType[Any]] = {Path: PATH, int: COUNT, float: TOLERANCE}


def command(
    arguments: type[Arguments], **settings: Any
) -> Callable[[Callable[[Arguments], None]], click.Command]:
    """Return a decorator: a function of ``arguments`` becomes a command with their options."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(arguments)  # type: ignore[arg-type]

    def decorate(function: Callable[[Arguments], None]) -> click.Command:
        @functools.wraps(function)
        def callback(**values: Any) -> None:
            function(arguments(**{f.name: f.metadata[_KEY].value(f.name, values) for f in fields}))

        decorated: Callable[..., Any] = callback
        for field in reversed(fields):
            decorated = field.metadata[_KEY].add(field.name, decorated)
        decorated = click.version_option(__version__)(decorated)
        settings.setdefault("context_settings", {"max_content_width": _HELP_WIDTH})
        return click.command(cls=OneLineCommand, **settings)(decorated)

    return decorate


def given_flags(context: click.Context) -> dict[str, str]:
    """Return the parameters given on the command line: their long flags by their names."""
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name
        and parameter.expose_value
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def flags_of_section(section: str) -> set[str]:
    """Return the long flags in a section of the running command."""
    parameters = click.get_current_context().command.params
    return {p.opts[-1] for p in parameters if getattr(p, "section", None) == section}


def pipeline_settings(*, of_server: bool = False, **fixed: Any) -> Any:
    """Return a field of PipelineSettings; ``fixed``: settings that have no option.

    of_server: whether the option's default is a server's: drafting from other clients' texts would
        reveal them by its speed.
    """
    pool = "Tokens of earlier texts that drafter ngram searches; 0: none."
    options = {
        "bundle": argument(type=PATH),
        "provider": "What runs the engines: cpu, cuda, webgpu, tensorrt or tensorrt-rtx.",
        "draft_provider": option(help="The same for the draft [as the target].", is_rare=True),
        "num_threads": option(
            "--threads", help="Threads of the target, and of a draft that is not small."
        ),
        "spin_us": option(
            type=COUNT_OR_NONE,
            metavar="MICROSECONDS",
            help="How long an idle engine thread waits busily before it sleeps [20].",
            is_rare=True,
        ),
        "engine_cache": option(
            type=click.Path(file_okay=False),
            help="Folder for prepared engines: later openings are faster.",
            is_rare=True,
        ),
        "cuda_graphs": option(
            help="On a GPU: capture calls of each size once and replay them [on cuda, webgpu].",
            is_rare=True,
        ),
        "verify": option(help="Check the hash of every file first.", is_rare=True),
        "prefix_cache": option(help="Do not reuse cache rows of earlier prompts.", is_rare=True),
        "generation_config": option(
            help="Ignore the bundle's generation_config.json, which has the model's own defaults.",
            is_rare=True,
        ),
        "loop": option(
            type=click.Choice(get_args(Loop)),
            help="What decodes: numpy (python) or the C++ core (native); auto: the core if it can "
            "[auto].",
            is_rare=True,
        ),
        "ngram_pool": option(
            type=COUNT_OR_NONE,
            help=f"For each API key. {pool}" if of_server else pool,
            **({"default": SERVER_NGRAM_POOL} if of_server else {}),
            is_rare=True,
        ),
    }
    members = {name: field for name, field in options.items() if name not in fixed}
    return group(PipelineSettings, fixed, section="Engines", **members)


_TRANSLATION = "Translation (encoder-decoders)"
_LANGUAGES = {
    SRC_LANG: "Language of the prompt, by the model's name: eng_Latn, en_XX [its tokenizer's].",
    TGT_LANG: "Language of the answer [that of generation_config.json].",
}


def decoding_options(*, of_server: bool = False) -> Any:
    """Return a field with an option for each row of the table; its value is a dict of those given.

    of_server: only options that may be defaults of a server, without languages.
    """
    options: dict[str, Any] = {}
    for section, rows in OPTIONS_BY_SECTION.items():
        for name, row in rows.items():
            if name == "constraint" and not of_server:
                for kind, settings in CONSTRAINT_OPTIONS.items():
                    options[kind] = option(**settings, section=section)
            elif name == "predicted_text" and not of_server:
                of_file = FileText(is_json=False)
                options[name] = option(
                    "--predicted-file", type=of_file, help=row.help, section=section
                )
            elif name == "scorers" and not of_server:
                for scorer, settings in SCORER_OPTIONS.items():
                    options[scorer] = option(**settings, section=section)
            elif name not in IN_PYTHON_ALONE and (row.is_set_by_server or not of_server):
                options[name] = _option_of(name, row, section)
    for name, text in () if of_server else _LANGUAGES.items():
        options[name] = option(help=text, metavar="NAME", section=_TRANSLATION, is_rare=True)
    return group(_given, **options)


def _option_of(name: str, row: OptionRow, section: str) -> Any:
    has_default = not callable(row.default) and row.default not in (None, ())
    is_list = isinstance(row.domain, Texts)
    return option(
        *(("--stop",) if is_list else ()),
        **({"multiple": True} if is_list else {}),
        type=OptionText(name),
        help=row.help.removesuffix(".") + f" [{row.default}]." if has_default else row.help,
        section=section,
        is_rare=not row.is_usual,
    )


def _given(**values: Any) -> dict[str, Any]:
    kinds = {name: values.pop(name) for name in CONSTRAINT_OPTIONS if name in values}
    values["constraint"] = constraint_given(kinds)
    of_scorers = {name: values.pop(name) for name in SCORER_OPTIONS if name in values}
    values["scorers"] = tuple(scorers_given(of_scorers))
    return {name: value for name, value in values.items() if value not in (None, ())}
