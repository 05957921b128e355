"""Write code from the tables of options and strategies: ``python -m scripts.option_tables``.

This code is the fields of DecodingConfig, which mypy must see, and the tables of native/core. In
C++ a domain is a struct of the same name and fields. Functions in a table (defaults that depend on
other options) are written by hand in option_table.cpp, with the same names.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace
from typing import Any

from dsbd_ort.decoding import option_row
from dsbd_ort.decoding.option_row import Chosen, Condition
from dsbd_ort.decoding.option_table import OPTION_TABLE, resolved_options
from dsbd_ort.decoding.option_values import OneOf
from dsbd_ort.decoding.strategies import STRATEGIES
from dsbd_ort.requests.option_defaults import NOT_BUILT

ROOT = Path(__file__).parents[1]
CORE, CONFIG = ROOT / "native" / "core", ROOT / "dsbd_ort" / "decoding" / "config.py"
BEGIN, END = "    # Written by scripts/option_tables.py:\n", "    # End of what it writes.\n"
HEAD = "// Written by scripts/option_tables.py from the tables of dsbd_ort; change those.\n"
CONDITIONS = {name: each for name, each in vars(option_row).items() if isinstance(each, Condition)}
ENUMS = {  # enumerations in C++, by option
    "coupling": "Coupling",
    "width_policy": "WidthPolicy",
    "drafter": "DrafterKind",
    "draft_policy": "PolicyKind",
    "memory": "Memory",
    "early_stopping": "EarlyStopping",
}
READERS = {  # readers in C++ for options that have other values there
    "seed": "seed_number",
    "constraint": "trie",
    "logits_processors": "nothing",
    "scorers": "nothing",
}
NO_FIELDS = ("strategy", "logits_processors", "scorers", "constraint")
"""Options without a field of the config in C++, which has a strategy's row, a constraint's file."""
TYPES = {  # types of a resolved value in Python and in C++, by domain or by option
    "Whole": ("int", "std::size_t"),
    "Wholes": ("tuple[int, ...]", "Ints"),
    "Number": ("float", "double"),
    "Text": ("str", "std::string"),
    "Texts": ("tuple[str, ...]", "std::vector<std::string>"),
    "TokenSequences": ("tuple[tuple[int, ...], ...]", "std::vector<Ints>"),
    "Biases": ("tuple[tuple[int, float], ...]", "std::vector<std::pair<std::int64_t, double>>"),
    "strategy": ("str", ""),
    "seed": ("int", "Uint128"),
    "draft_beams": ("tuple[int, ...]", "std::vector<std::size_t>"),
    "draft_context": ('int | Literal["all", "auto"]', "std::size_t"),
    "constraint": ("Any", ""),
    "logits_processors": ("tuple[Any, ...]", ""),
    "scorers": ("tuple[Any, ...]", ""),
}


def files() -> dict[Path, str]:
    """Return the contents of the written files."""
    tables = {
        "strategies": _strategies(),
        "conditions": _conditions(),
        "options": _options(),
        "option_fields": _fields(),
        "unread_fields": (f"{{{cpp(name)}, {cpp(off)}}}," for name, off in NOT_BUILT.items()),
    }
    before, begin, rest = CONFIG.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    fields = "".join(f"    {name}: {_python_type(name)}\n" for name in OPTION_TABLE)
    contents = {CORE / f"{name}.inc": HEAD + _code(lines) for name, lines in tables.items()}
    return contents | {CONFIG: before + begin + fields + end + after}


def _code(lines: Iterable[str]) -> str:
    """Return lines of C++; lines that are too long are wrapped."""
    wrapped = []
    for line in lines:
        glued = re.sub(r'"[^"]*"|\.\w+ = ', lambda text: text[0].replace(" ", "\0"), line)
        parts = wrap(glued, 96, break_long_words=False, break_on_hyphens=False)
        wrapped.append("\n    ".join(parts).replace("\0", " ") + "\n")
    return "".join(wrapped)


def cpp(value: Any) -> str:
    """Return a value in the syntax of C++: a domain, or a value that JSON supports."""
    if dataclasses.is_dataclass(value):
        fields = ", ".join(
            f".{field.name} = {cpp(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default and field.name != "is_ordered"  # no sets
        )
        return f"{type(value).__name__}{{{fields}}}"
    if isinstance(value, tuple):
        return f"Values{{{', '.join(map(cpp, value))}}}"
    names = {"null": "nullptr", "[]": "Json::array()", "{}": "Json::object()"}
    names[json.dumps(sys.float_info.max)] = "LARGEST"
    return names.get(json.dumps(value), json.dumps(value))


def _strategies() -> Iterator[str]:
    for name, row in STRATEGIES.items():
        rule = f"Rule::{row.rule.replace('-', '_')}"
        flags = map(cpp, (row.has_draft, row.has_beams, row.has_draft_tree))
        yield f"{{{', '.join((cpp(name), rule, *flags, cpp(row.at_zero or '')))}}},"


def _conditions() -> Iterator[str]:
    for name, row in CONDITIONS.items():
        values = row.unless if row.among is None else row.among
        cells = (row.option, cpp(row.among is not None), cpp(values), cpp(row.remedy))
        yield f"const Condition {name}{{{', '.join(cells)}}};"


def _options() -> Iterator[str]:
    """Yield the rows: calls of macros that the including file defines."""
    for name, row in OPTION_TABLE.items():
        kind = "PROCESSOR" if row.is_processor else "OPTION"
        yield f"{'OTHER_OPTION' if name in NO_FIELDS else kind}({name}, {', '.join(_cells(name))})"
    yield from ("#undef OPTION", "#undef PROCESSOR", "#undef OTHER_OPTION")


def _cells(name: str) -> Iterator[str]:
    """Yield the fields of a row that differ from the defaults."""
    row = OPTION_TABLE[name]
    yield f".domain = {READERS.get(name) or cpp(row.domain)}"
    if callable(row.default):
        yield f".usual_of = {_function(row.default)}"
    elif row.default is not None:
        yield f".usual = {cpp([] if row.default == () else row.default)}"
    if row.needs:
        names = [f"&{n}" for need in row.needs for n, each in CONDITIONS.items() if each is need]
        yield f".needs = {{{', '.join(names)}}}"
    if row.neutral is not None:
        values = cpp(row.neutral) if isinstance(row.neutral, tuple) else None
        yield f".neutral = {f'always({values})' if values else _function(row.neutral)}"
    if row.is_redundant(Chosen(is_cold=True)):
        yield ".is_redundant_if_cold = true"
    if row.is_processor:
        yield ".is_processor = true"
    if row.of_model is not None:
        yield f".of_model = {row.of_model.replace('-', '_')}"


def _function(function: Any) -> str:
    """Return the name of a function; for a lambda, the value that it always returns."""
    if function.__name__ != "<lambda>":
        return str(function.__name__)
    value = function(SimpleNamespace())
    return f"usually({cpp([] if value == () else value)})"


def may_be_none(name: str, *, is_open: bool) -> bool:
    """Return whether an option may be None; is_open: before draft and costs are determined."""
    settled = None if is_open else True
    return any(
        resolved_options({"strategy": s}, settled, settled)[name] is None for s in STRATEGIES
    )


def _python_type(name: str) -> str:
    domain = OPTION_TABLE[name].domain
    if isinstance(domain, OneOf) and name not in TYPES:
        texts = ", ".join(cpp(each) for each in domain.choices if isinstance(each, str))
        kinds = ["bool"] * (False in domain.choices) + [f"Literal[{texts}]"] * bool(texts)
        kind = " | ".join(kinds)
    else:
        kind, _ = TYPES.get(name) or TYPES[type(domain).__name__]
    return f"{kind} | None" if may_be_none(name, is_open=True) and kind != "Any" else kind


def _fields() -> Iterator[str]:
    """Yield the enumerations, and the fields of the config with their default values."""
    for name, enum in ENUMS.items():
        names = {False: "no", True: "yes"}
        choices: Any = OPTION_TABLE[name].domain
        each = (names.get(choice, str(choice).replace("+", "_and_")) for choice in choices.choices)
        yield f"enum class {enum} : std::uint8_t {{ {', '.join(each)} }};"
    yield "struct DecodingOptions {"
    for name, row in OPTION_TABLE.items():
        if name in NO_FIELDS:
            continue
        kind = "bool" if isinstance(row.domain, OneOf) else type(row.domain).__name__
        kind = ENUMS.get(name) or (TYPES.get(name) or TYPES.get(kind, ("", kind)))[1]
        if may_be_none(name, is_open=False) and kind != "std::string":
            kind = "std::int64_t" if kind == "std::size_t" and row.default is None else kind
            kind = f"std::optional<{kind}>"
        is_plain = isinstance(row.default, int | float) and name not in ENUMS
        yield f"    {kind} {name}{{{cpp(row.default) if is_plain else ''}}};"
    yield "};"


def main() -> None:
    """Write the files."""
    for file, text in files().items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
