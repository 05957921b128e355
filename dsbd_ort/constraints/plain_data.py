r"""Constraints read from plain data: of the command line, a JSONL line, HTTP, or a C caller.

One key names the kind, the others set its layout or its end:

    {"json_schema": {"type": "object"}, "flexible_whitespace": true}
    {"json_object": true}
    {"regex": "[0-9]{3}"}
    {"choice": ["yes", "no"]}
    {"grammar": "start: \"a\" | \"b\""}
    {"trie": "items.trie", "end": "eos"}

Every grammar may also have ``"canonical": true``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dsbd_ort.constraints.grammar import (
    Canonical,
    Choice,
    FunctionCalls,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
)
from dsbd_ort.constraints.token_trie import TokenTrie
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.option_values import did_you_mean, shown

TrieOfName = Callable[[str], TokenTrie]

_LAYOUT: dict[str, type] = {
    "item_separator": str,
    "key_separator": str,
    "flexible_whitespace": bool,
}
_SPELLING: dict[str, type] = {"canonical": bool}
_END: dict[str, type] = {"end": str}
_OTHERS: dict[str, dict[str, type]] = {  # other keys of each kind, and their types
    "json_schema": _LAYOUT | _SPELLING,
    "json_object": _LAYOUT | _SPELLING,
    "regex": _SPELLING,
    "choice": _SPELLING,
    "grammar": _SPELLING,
    "trie": _END,
}
KINDS = tuple(_OTHERS)
"""The kinds of constraints that plain data can name."""

_KIND_BY_CLASS = {
    JsonSchema: "json_schema",
    FunctionCalls: "json_schema",
    JsonObject: "json_object",
    Regex: "regex",
    Choice: "choice",
    Lark: "grammar",
    TokenTrie: "trie",
}
_JSON_NAMES = {str: "a text", bool: "true or false"}


def kind_of(constraint: object) -> str:
    """Return the kind of a constraint, as plain data and metrics name it."""
    of = constraint.grammar if isinstance(constraint, Canonical) else constraint
    return _KIND_BY_CLASS.get(type(of), "other")


def constraint_from_data(data: Mapping[str, Any], trie_of_name: TrieOfName) -> Any:
    """Return the constraint that plain data describes, see the module.

    trie_of_name: returns the trie of a file, or of a name.

    Raises:
        ConstraintError: the data describes no constraint; the message begins with "constraint".
    """
    kind = _kind(data)
    value = data[kind]
    others = {name: other for name, other in data.items() if name != kind}
    _check_others(kind, others)
    is_canonical = others.pop("canonical", False)
    found = _constraint_of(kind, value, others, trie_of_name)
    return Canonical(found) if is_canonical else found


def _constraint_of(
    kind: str, value: Any, others: Mapping[str, Any], trie_of_name: TrieOfName
) -> Any:
    if kind == "json_schema":
        return JsonSchema(value, **others)
    if kind == "json_object":
        if value is not True:
            raise ConstraintError(
                f"constraint has json_object {shown(value)}; use true, or leave the constraint out"
            )
        return JsonObject(**others)
    if kind == "choice":
        if not isinstance(value, list | tuple):
            raise ConstraintError(f"constraint has choice {shown(value)}; expected a list of texts")
        return Choice(value)
    if not isinstance(value, str):
        raise ConstraintError(f"constraint has {kind} {shown(value)}; expected a text")
    if kind == "trie":
        return _with_end(trie_of_name(value), others.get("end"))
    return Regex(value) if kind == "regex" else Lark(value)


def with_constraint(options: Mapping[str, Any], trie_of_name: TrieOfName) -> dict[str, Any]:
    """Return the options of a request, a constraint that is plain data among them read."""
    constraint = options.get("constraint")
    if not isinstance(constraint, Mapping):
        return dict(options)
    return {**options, "constraint": constraint_from_data(constraint, trie_of_name)}


def _kind(data: Mapping[str, Any]) -> str:
    given = [kind for kind in KINDS if kind in data]
    if len(given) > 1:
        raise ConstraintError(
            f"constraint has {' and '.join(given)}; give one of them: a request has one constraint"
        )
    if not given:
        name = next(iter(data), None)
        expected = f"; expected one of {', '.join(KINDS)}"
        close = did_you_mean(name, KINDS) if name is not None else ""
        raise ConstraintError(f"constraint has {shown(list(data))}{close or expected}")
    return given[0]


def _check_others(kind: str, others: Mapping[str, Any]) -> None:
    known = _OTHERS[kind]
    for name, value in others.items():
        if name not in known:
            raise ConstraintError(
                f"constraint has {shown(name)} with {kind}; expected one of {', '.join(known)} "
                "there"
            )
        if not isinstance(value, known[name]):
            raise ConstraintError(
                f"constraint has {name} {shown(value)}; expected {_JSON_NAMES[known[name]]}"
            )


def _with_end(trie: TokenTrie, end: str | None) -> TokenTrie:
    if end is None or end == trie.end:
        return trie
    if end not in ("leaf", "eos"):
        raise ConstraintError(f"constraint has end {end!r}; a trie ends with 'leaf' or 'eos'")
    return trie.ending("eos" if end == "eos" else "leaf")
