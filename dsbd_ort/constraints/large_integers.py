r"""JSON schemas with the ranges of int64 and uint64, as Lark grammars that keep every digit.

llguidance 1.9 holds bounds as float64 and int64: it rounds 2**53 + 1, fails at -2**63 and reads
2**64 - 1 as 2**63 - 1 (docs/troubleshooting.md, "Upstream"). So the path from the root to such
an integer is written in Lark; everything else in the schema stays a schema:

    start: "{" r4 "}"           {"type": "object", "properties": {"id": {"type": "integer",
    r4: "\"id\"" COLON T3 ...     "minimum": 0, "maximum": 2**64 - 1}}, "required": ["id"]}
    T3: /0|[1-9][0-9]*/ & /18446744073709551615|[0-9]{1,19}|.../
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.decoding.errors import ConstraintError

LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords that may hold a list of schemas."""
_ONE = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
_CROWDED = 50  # properties
_MOST_CROWDED = 8


def children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas directly within a schema, except its definitions."""
    yield from (schema[key] for key in _ONE if key in schema)
    for key in LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from schema[key].values()


def referred(root: Mapping[str, Any], reference: object) -> Any:
    """Return the schema that a reference within the document names; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def users_of_schemas(
    root: Mapping[str, Any],
) -> tuple[list[Mapping[str, Any]], dict[int, list[int]]]:
    """Return a document's schemas, and for the ``id`` of each the ids of schemas that use it."""
    users: dict[int, list[int]] = {id(root): []}
    schemas = [root]
    for schema in schemas:  # the list grows in the loop
        for child in (*children(schema), referred(root, schema.get("$ref"))):
            if isinstance(child, Mapping):
                if id(child) not in users:
                    users[id(child)] = []
                    schemas.append(child)
                users[id(child)].append(id(schema))
    return schemas, users


def crowded_parts(root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas below the root with the most properties, each usable alone."""
    crowded = [
        schema
        for schema in users_of_schemas(root)[0][1:]
        if isinstance(schema.get("properties"), Mapping) and len(schema["properties"]) > _CROWDED
    ]
    crowded.sort(key=lambda schema: -len(schema["properties"]))
    definitions = {key: root[key] for key in (*DEFINITIONS, "x-guidance") if key in root}
    return [{**definitions, **schema} for schema in crowded[:_MOST_CROWDED]]


_LARGE, _LOWEST, _HIGHEST = 2**53, -(2**63), 2**64 - 1
_BOUNDS = ("minimum", "maximum")
_OTHER_NUMBERS = ("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_UNSUPPORTED = {  # in the schema of a large integer, and in those that contain it
    *_OTHER_NUMBERS,
    *"oneOf not if then else patternProperties minProperties maxProperties propertyNames".split(),
    *"dependencies dependentRequired dependentSchemas unevaluatedProperties prefixItems".split(),
    *"additionalItems contains minContains maxContains uniqueItems unevaluatedItems".split(),
    *("$dynamicRef", "$recursiveRef"),
}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
_KEY = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'
_ONE_BLANK = '%llguidance {"ignore_once": true}'  # as llguidance does for a schema


def lark_of_schema(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Return a Lark grammar of a schema with integers beyond 2**53, None for any other schema.

    A ConstraintError names a number that would be rounded. ``options`` are llguidance's options for
    JSON; the schema's key ``x-guidance`` overrides them.
    """
    try:
        if not (bound_by_node := _large_bounds(schema)):
            return None
        overrides = schema.get("x-guidance", {})
        return _Writer(schema, {**options, **overrides}, bound_by_node).grammar()
    except (RecursionError, AttributeError, TypeError, OverflowError) as error:
        raise ConstraintError(
            f"the JSON schema nests too deep or has a value of a wrong type ({error})"
        ) from error


def _large_bounds(root: Mapping[str, Any]) -> dict[int, str]:
    """Return a large bound, as text, for the ``id`` of each schema that has or refers to one."""
    schemas, users = users_of_schemas(root)
    pending: list[tuple[int, str]] = []
    for schema in schemas:
        types = schema.get("type", "number")
        for key in (*_BOUNDS, *_OTHER_NUMBERS):
            if (number := _large_number(schema.get(key))) is not None:
                if key in _OTHER_NUMBERS or "number" in types:
                    raise _refused(f"{key} {number}")
                pending.append((id(schema), f"{key} {number}"))
    bound_by_node: dict[int, str] = {}
    while pending:
        node, bound = pending.pop()
        if node not in bound_by_node:
            bound_by_node[node] = bound
            pending += [(user, bound) for user in users[node]]
    return bound_by_node


def _large_number(value: object) -> int | float | None:
    if isinstance(value, Mapping | list):
        within = map(_large_number, value.values() if isinstance(value, Mapping) else value)
        return next((number for number in within if number is not None), None)
    return value if isinstance(value, int | float) and abs(value) >= _LARGE else None


def _refused(bound: str, where: str = "") -> ConstraintError:
    return ConstraintError(
        f"the JSON schema has {bound}{where}, which would be rounded; from 2**53 on, only minimum "
        "and maximum of type 'integer' are exact, within -2**63 to 2**64 - 1: leave it out, or "
        "describe the number as a string with a pattern"
    )


@dataclass(slots=True)
class _Writer:
    """Writes schemas: each method returns an expression in Lark, and may add lines."""

    root: Mapping[str, Any]
    options: dict[str, Any]
    bound_by_node: dict[int, str]
    lines: list[str] = field(default_factory=list)
    rule_by_reference: dict[str, str] = field(default_factory=dict)

    def grammar(self) -> str:
        blank = self.options.get("whitespace_pattern")
        if blank is None and self.options.get("whitespace_flexible", True):
            blank = r"[\x20\x0A\x0D\x09]+"
        self.lines += [
            f"start: {self.schema(self.root)}",
            f"COMMA: {_regex(self.options.get('item_separator', ','))}",
            f"COLON: {_regex(self.options.get('key_separator', ':'))}",
            *([] if blank is None else [_ONE_BLANK, f"%ignore {_regex(blank)}"]),
        ]
        return "\n".join(self.lines)

    def line(self, body: str, kind: str = "r") -> str:
        """Add a rule, or a terminal "T"; return its name."""
        self.lines.append(f"{kind}{len(self.lines)}: {body}")
        return f"{kind}{len(self.lines) - 1}"

    def schema(self, schema: Any) -> str:
        bound = self.bound_by_node.get(id(schema))
        if bound is None:
            return self.fragment(schema)
        for key in schema:
            if key in _UNSUPPORTED or (key == "allOf" and len(schema[key]) > 1):
                raise _refused(bound, f" with or below {key!r}")
        combined = [key for key in ("$ref", "anyOf", "allOf") if key in schema]
        if not combined:
            return self.typed(schema, bound)
        if len(combined) > 1 or not {"type", "properties", "items", *_BOUNDS}.isdisjoint(schema):
            raise _refused(bound, f" in a schema with more than {combined[0]!r}")
        value = schema[combined[0]]
        if combined != ["$ref"]:
            return f"({' | '.join(map(self.schema, value))})"
        if value not in self.rule_by_reference:
            self.rule_by_reference[value] = name = f"d{len(self.rule_by_reference)}"
            self.lines.append(f"{name}: {self.schema(referred(self.root, value))}")
        return self.rule_by_reference[value]

    def fragment(self, schema: Any) -> str:
        """Write a schema without large numbers as JSON, with the definitions that it may use."""
        written = {} if schema is True else {**schema}
        if '"$ref"' in json.dumps(written):
            written |= {key: self.root[key] for key in DEFINITIONS if key in self.root}
            if _OTHER_REFERENCE.search(json.dumps(written)):
                raise ConstraintError("the JSON schema has a '$ref' not in '$defs'; move it there")
        return self.line(f"%json {json.dumps({**written, 'x-guidance': self.options})}")

    def typed(self, schema: Mapping[str, Any], bound: str) -> str:
        """Write one alternative per type; types without large numbers stay one JSON schema."""
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else types
        values = [*schema.get("properties", {}).values(), schema.get("additionalProperties")]
        written = {}
        if "object" in types and any(id(value) in self.bound_by_node for value in values):
            written["object"] = self.object(schema)
        if "array" in types and id(schema.get("items")) in self.bound_by_node:
            written["array"] = self.array(schema)
        if "integer" in types and not schema.keys().isdisjoint(_BOUNDS):
            written["integer"] = self.line(_integers(schema, bound), "T")
        if others := [name for name in types if name not in written]:
            rest = {key: value for key, value in schema.items() if key not in _BOUNDS}
            written["others"] = self.fragment({**rest, "type": others})
        return f"({' | '.join(written.values())})"

    def object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        names = [*dict.fromkeys([*properties, *required])]
        after, whole = "", '""'  # entries after another one; all entries
        if others is not False:
            key = self.line(" & ".join([_KEY, *(f"~{_string(name)}" for name in names)]), "T")
            entry = self.line(f"{key} COLON {self.schema(others)}")
            after, whole = f"(COMMA {entry})*", f"({entry} (COMMA {entry})*)?"
        for name in reversed(names):
            entry = f"{_string(name)} COLON {self.schema(properties.get(name, others))}"
            first = self.line(f"{entry} {after}")
            whole = first if name in required else self.line(f"{first} | {whole}")
            after = self.line(f"COMMA {first}" if name in required else f"COMMA {first} | {after}")
        return f'"{{" {whole} "}}"'

    def array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self.line(self.schema(schema["items"]))
        more = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        items = '""' if most == 0 else f"{item} (COMMA {item}){more}"
        return f'"[" ({items}){"" if least else "?"} "]"'


def _integers(schema: Mapping[str, Any], bound: str) -> str:
    """Return the body of a terminal for the integers between the bounds of a schema."""
    low = math.ceil(schema["minimum"]) if "minimum" in schema else None
    high = math.floor(schema["maximum"]) if "maximum" in schema else None
    if (low or 0) < _LOWEST or (high or 0) > _HIGHEST:
        raise _refused(bound)
    if low is not None and high is not None and low > high:
        raise ConstraintError(f"the JSON schema allows no integer: from {low} to {high}")
    written = [_naturals(max(low or 0, 0), high)] if high is None or high >= 0 else []
    if low is None or low < 0:
        negative = _naturals(max(1, -(high or 0)), None if low is None else -low)
        written.append(f'"-" ({negative})')
    return " | ".join(written)


def _naturals(low: int, high: int | None) -> str:
    """Return the body of a terminal for the integers from ``low``, 0 or more, to ``high``."""
    upper = [] if high is None else [f"/{_at_most(high)}/"]
    return " & ".join(["/0|[1-9][0-9]*/", *upper, *([f"~/{_at_most(low - 1)}/"] if low else [])])


def _at_most(high: int) -> str:
    """Return a pattern of the integers from 0 to ``high``: 251|[0-9]{1,2}|[0-1][0-9]{2}|..."""
    text = str(high)
    ways = [text, *([f"[0-9]{{1,{len(text) - 1}}}"] if len(text) > 1 else [])]
    for index, digit in enumerate(text):
        if digit != "0":
            ways.append(f"{text[:index]}[0-{int(digit) - 1}][0-9]{{{len(text) - index - 1}}}")
    return "|".join(ways)


def _string(text: str) -> str:
    """Return a literal of Lark for a text as JSON writes it."""
    return json.dumps(json.dumps(text, ensure_ascii=False)).replace("\x7f", "\\u007f")


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/") + "/"
