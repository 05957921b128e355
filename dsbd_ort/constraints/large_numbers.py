r"""JSON schemas with numbers beyond 2**53, as Lark grammars that keep every digit.

llguidance reads numbers as floats, so that a maximum of 2**63 - 1 would be another. Of such a
schema the way from the root to these numbers is written in Lark, with patterns of digits, and all
else in it stays a schema of its own:

    start: "{" KEY_0 COLON N1 "}"           {"properties": {"id": {"maximum": 2**63 - 1, ...}}}
    N1: /0|[1-9][0-9]{0,17}|.../

What stands on that way and has no counterpart here is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from dsbd_ort.constraints.digit_patterns import (
    integers_between,
    multiples_of,
    numbers_between,
)
from dsbd_ort.constraints.number_range import NumberRange
from dsbd_ort.constraints.schema_nodes import (
    DEFINITIONS,
    LISTS,
    children,
    referred,
    users_of_schemas,
)
from dsbd_ort.decoding.errors import ConstraintError

_LARGE = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMERIC = frozenset((*_BOUNDS, "multipleOf", "type"))
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_KEYWORDS_BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "additionalItems", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    ),
}
_UNSUPPORTED = (  # of the types that are written here
    "patternProperties",
    "minProperties",
    "maxProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)


def lark_of_schema(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Return a Lark grammar of a schema with large numbers, None for one without.

    Args:
        schema: its root.
        options: those of llguidance for JSON; a schema's own, ``x-guidance``, go before them.

    Raises:
        ConstraintError: the numbers stand where they cannot be kept; the message says where.
    """
    large = _nodes_with_large_numbers(schema)
    if not large:
        return None
    own = schema.get("x-guidance")
    writer = _Writer(schema, {**options, **(own if isinstance(own, Mapping) else {})}, large)
    try:
        return writer.grammar()
    except RecursionError as error:
        raise ConstraintError("the JSON schema nests too deep; flatten it") from error
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConstraintError):
            raise
        raise ConstraintError(
            f"the JSON schema has a keyword whose value is of a wrong type ({error})"
        ) from error


def _is_large(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) >= _LARGE


def _holds_large(value: object) -> bool:
    """Return whether a value of JSON holds a large integer."""
    if isinstance(value, Mapping):
        return any(map(_holds_large, value.values()))
    if isinstance(value, list):
        return any(map(_holds_large, value))
    return isinstance(value, int) and _is_large(value)


def _nodes_with_large_numbers(root: Mapping[str, Any]) -> set[int]:
    """Return the ids of the schemas that hold large numbers, or use one that does."""
    schemas, users = users_of_schemas(root)
    found = [
        id(schema)
        for schema in schemas
        if any(_is_large(schema.get(key)) for key in _BOUNDS)
        or any(_holds_large(schema.get(key)) for key in ("const", "enum"))
    ]
    large: set[int] = set()
    while found:
        if (node := found.pop()) not in large:
            large.add(node)
            found += users[node]
    return large


@dataclass(slots=True)
class _Writer:
    """Writes rules: each method returns an expression in Lark, None where no text is possible."""

    root: Mapping[str, Any]
    options: dict[str, Any]
    large: set[int]
    lines: list[str] = field(default_factory=list)
    rule_by_reference: dict[str, str] = field(default_factory=dict)
    num_names: int = 0

    def grammar(self) -> str:
        """Return the grammar."""
        start = self.schema(self.root)
        if start is None:
            raise ConstraintError("the JSON schema allows no text: its bounds exclude each other")
        blank = self.options.get("whitespace_pattern")
        if blank is None and self.options.get("whitespace_flexible", True):
            blank = r"[\x20\x0A\x0D\x09]+"
        head = [
            f"start: {start}",
            f"COMMA: {_regex(self.options.get('item_separator', ','))}",
            f"COLON: {_regex(self.options.get('key_separator', ':'))}",
            *([] if blank is None else [_ONE_BLANK, f"%ignore {_regex(blank)}"]),
        ]
        return "\n".join([*head, *self.lines])

    def schema(self, schema: Any) -> str | None:
        """Write a schema."""
        if schema is False:
            return None
        if id(schema) not in self.large:
            return self.fragment(schema)
        self.check(schema)
        rest = {key: value for key, value in schema.items() if key in _NUMERIC}
        for key, write in (
            ("$ref", self.reference),
            ("allOf", self.all_of),
            ("anyOf", self.any_of),
            ("oneOf", self.one_of),
            ("enum", self.enum),
            ("const", self.const),
        ):
            if key in schema:
                self.check_beside(schema, key)
                return write(schema[key], rest)
        return self.by_type(schema)

    def check(self, schema: Mapping[str, Any]) -> None:
        for key in _UNSUPPORTED:
            if key in schema:
                raise _cannot_keep(f"beside or below {key!r}")

    def check_beside(self, schema: Mapping[str, Any], applied: str) -> None:
        known = {applied, *_NUMERIC}
        checked = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const"}
        checked.update(*_KEYWORDS_BY_TYPE.values())
        for key in schema:
            if key in checked and key not in known:
                raise _cannot_keep(f"under {applied!r} beside {key!r}")

    def fragment(self, schema: Any) -> str:
        """Write a schema without large numbers as llguidance reads it."""
        schema = {} if schema is True else schema
        definitions: dict[str, dict[str, Any]] = {}
        self.collect(schema, definitions)
        text = json.dumps({**schema, **definitions, "x-guidance": self.options})
        return self.rule(f"%json {text}")

    def collect(self, schema: Any, found: dict[str, dict[str, Any]]) -> None:
        """Add the definitions that a schema refers to."""
        if not isinstance(schema, Mapping):
            return
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            start, _, name = reference[2:].partition("/")
            if start not in DEFINITIONS or not name or "/" in name:
                raise _cannot_keep(f"beside a reference to {reference!r}, which is not in '$defs'")
            name = name.replace("~1", "/").replace("~0", "~")
            target = referred(self.root, reference)
            group = found.setdefault(start, {})
            if name not in group and target is not None:
                group[name] = target
                self.collect(target, found)
        for child in children(schema):
            self.collect(child, found)

    def rule(self, body: str) -> str:
        name = f"r{self.num_names}"
        self.num_names += 1
        self.lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{self.num_names}"
        self.num_names += 1
        self.lines.append(f"{name}: {body}")
        return name

    def alternatives(self, written: list[str | None]) -> str | None:
        possible = [each for each in written if each is not None]
        return f"({' | '.join(possible)})" if possible else None

    def reference(self, reference: object, rest: Mapping[str, Any]) -> str | None:
        if rest:
            raise _cannot_keep(f"under '$ref' beside {next(iter(rest))!r}")
        if not isinstance(reference, str):
            raise _cannot_keep(f"under the '$ref' {reference!r}")
        if reference not in self.rule_by_reference:
            self.rule_by_reference[reference] = name = f"d{len(self.rule_by_reference)}"
            written = self.schema(referred(self.root, reference))
            if written is None:
                written = r"/[^\s\S]/"
            self.lines.append(f"{name}: {written}")
        return self.rule_by_reference[reference]

    def all_of(self, members: list[Any], rest: Mapping[str, Any]) -> str | None:
        if len(members) == 1 and not rest:
            return self.schema(members[0])
        ranges = [_numeric_range(member) for member in (*members, *([rest] if rest else []))]
        if None in ranges:
            raise _cannot_keep("under 'allOf' with others than bounds of numbers")
        found = NumberRange()
        for each in ranges:
            if each is not None:
                found = found & each
        return self.numbers(found)

    def any_of(self, members: list[Any], rest: Mapping[str, Any]) -> str | None:
        if not rest:
            return self.alternatives([self.schema(member) for member in members])
        return self.alternatives([self.all_of([member], rest) for member in members])

    def one_of(self, members: list[Any], rest: Mapping[str, Any]) -> str | None:
        kinds = [_kinds(member) for member in members]
        if self.options.get("coerce_one_of") or self.options.get("lenient"):
            return self.any_of(members, rest)
        if sum(map(len, kinds)) > len(frozenset().union(*kinds)):
            raise _cannot_keep("under 'oneOf' whose members share a type: use 'anyOf'")
        return self.any_of(members, rest)

    def const(self, value: object, rest: Mapping[str, Any]) -> str | None:
        return self.enum([value], rest)

    def enum(self, values: list[Any], rest: Mapping[str, Any]) -> str | None:
        kept = [value for value in values if _is_instance(value, rest)]
        small = [value for value in kept if not _holds_large(value)]
        written: list[str | None] = [self.fragment({"enum": small})] if small else []
        return self.alternatives(
            [*written, *(self.value(value) for value in kept if _holds_large(value))]
        )

    def value(self, value: Any) -> str:
        """Write one value."""
        if not _holds_large(value):
            return self.fragment({"const": value})
        if isinstance(value, list):
            return f'"[" {" COMMA ".join(map(self.value, value))} "]"'
        if isinstance(value, Mapping):
            entries = (f"{_string(k)} COLON {self.value(v)}" for k, v in value.items())
            return f'"{{" {" COMMA ".join(entries)} "}}"'
        return f'"{value}"'

    def by_type(self, schema: Mapping[str, Any]) -> str | None:
        """Write a schema by the types that it allows, those without large numbers together."""
        given = schema.get("type", list(_TYPES))
        types = [given] if isinstance(given, str) else list(given)
        written: list[str | None] = []
        others: list[str] = []
        for name in types:
            if name in ("integer", "number"):
                if name == "number" or "number" not in types:
                    found = NumberRange.of(schema, is_integer=name == "integer")
                    written.append(self.numbers(found))
            elif any(
                id(child) in self.large
                for child in children(
                    {k: schema[k] for k in _KEYWORDS_BY_TYPE.get(name, ()) if k in schema}
                )
            ):
                written.append(self.object(schema) if name == "object" else self.array(schema))
            else:
                others.append(name)
        if others:
            keys = [key for name in others for key in _KEYWORDS_BY_TYPE.get(name, ())]
            part = {key: schema[key] for key in keys if key in schema}
            written.append(self.fragment({"type": others, **part}))
        return self.alternatives(written)

    def numbers(self, found: NumberRange) -> str | None:
        """Write a range of numbers."""
        if (found.integers() if found.is_integer else found).is_empty:
            return None
        if not any(bound is not None and abs(bound) >= _LARGE for bound in (found.low, found.high)):
            return self.fragment(found.schema())
        if found.factor is not None and not found.is_integer:
            if found.factor.denominator != 1:
                raise _cannot_keep("beside a multipleOf that is no integer")
            found = found & NumberRange(is_integer=True)
        if found.is_integer:
            return self.integers(found.integers())
        written: list[str | None] = []
        if found.low is not None and found.low.denominator != 1:
            least = Fraction(math.ceil(found.low))
            rest = found & NumberRange(high=least, has_high=False)
            written.append(self.fragment(rest.schema()))
            found = replace(found, low=least, has_low=True)
        if found.high is not None and found.high.denominator != 1:
            most = Fraction(math.floor(found.high))
            rest = found & NumberRange(low=most, has_low=False)
            written.append(self.fragment(rest.schema()))
            found = replace(found, high=most, has_high=True)
        low, high = (None if bound is None else int(bound) for bound in (found.low, found.high))
        pattern = numbers_between(low, high, has_low=found.has_low, has_high=found.has_high)
        return self.alternatives([*written, self.terminal(f"/{pattern}/")])

    def integers(self, found: NumberRange) -> str | None:
        """Write a range of integers, its bounds in it."""
        low, high = (None if bound is None else int(bound) for bound in (found.low, found.high))
        pattern = f"/{integers_between(low, high)}/"
        factor = 1 if found.factor is None else found.factor.numerator
        if factor == 0:
            raise _cannot_keep("beside a multipleOf of 0")
        if factor == 1:
            return self.terminal(pattern)
        if low is None or high is None:
            raise _cannot_keep(f"beside multipleOf {factor} without a minimum and a maximum")
        if not -(-low // factor) <= high // factor:
            return None
        texts = multiples_of(factor, max(len(str(abs(low))), len(str(abs(high)))))
        if texts is None:
            raise _cannot_keep(f"beside multipleOf {factor}")
        self.lines += [text for text in texts if text not in self.lines]
        names = [text.partition(":")[0] for text in texts]
        return self.terminal(" & ".join([pattern, *names]))

    def object(self, schema: Mapping[str, Any]) -> str | None:
        """Write an object: properties in the order of the schema, then others."""
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        entries: list[tuple[str, bool]] = []
        for name in [*properties, *(name for name in required if name not in properties)]:
            value = self.schema(properties.get(name, others))
            if value is not None:
                entries.append((f"{_string(name)} COLON {value}", name in required))
            elif name in required:
                return None
        other = self.schema(others)
        names = [*dict.fromkeys([*properties, *required])]
        behind = before = ""
        if other is not None:
            key = self.terminal(" & ".join([_KEY, *(f"~{_string(name)}" for name in names)]))
            entry = self.rule(f"{key} COLON {other}")
            behind, before = f"(COMMA {entry})*", f"({entry} (COMMA {entry})*)?"
        for entry, is_required in reversed(entries):
            following = behind
            behind = self.rule(
                f"COMMA {entry} {behind}" if is_required else f"(COMMA {entry})? {behind}"
            )
            first = f"{entry} {following}"
            before = self.rule(first if is_required else f"{first} | {before or _EMPTY}")
        return f'"{{" {before} "}}"'

    def array(self, schema: Mapping[str, Any]) -> str | None:
        """Write an array."""
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list) or "additionalItems" in schema:
            prefix = items if isinstance(items, list) else []
            items = schema.get("additionalItems", True) if isinstance(items, list) else items
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        written = [self.schema(each) for each in prefix[:most]]
        if None in written:
            most = written.index(None)
        item = self.schema(items)
        if item is None:
            most = min(len(written), math.inf if most is None else most)
        if most is not None and least > most:
            return None
        firsts = [each for each in written[:most] if each is not None]
        tail = _repeated(item, len(firsts), least, most) if item is not None else ""
        for index in range(len(firsts) - 1, -1, -1):
            tail = f"{'COMMA ' if index else ''}{firsts[index]} {tail}"
            if index >= least:
                tail = f"({tail})?"
        return f'"[" {tail} "]"'


_EMPTY = '""'
_ONE_BLANK = '%llguidance {"ignore_once": true}'
"""As in a schema: the parts that are schemas are read together with what is around them."""
_KEY = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'


def _repeated(item: str, done: int, least: int, most: int | None) -> str:
    """Return ``item`` as often as it may follow so many others."""
    low, high = max(least - done, 0), None if most is None else most - done
    if high == 0:
        return ""
    if done:
        return f"(COMMA {item})" + _times(low, high)
    more = f"{item} (COMMA {item})" + _times(max(low - 1, 0), None if high is None else high - 1)
    return more if low else f"({more})?"


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _string(text: str) -> str:
    """Return a literal of Lark for a text as JSON writes it."""
    quoted = json.dumps(json.dumps(text, ensure_ascii=False))
    return quoted.replace("\x7f", "\\u007f")


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/") + "/"


def _numeric_range(schema: Any) -> NumberRange | None:
    """Return the range that a schema of numbers alone describes, None for another."""
    if not isinstance(schema, Mapping):
        return None
    others = {"$ref", *LISTS, *_UNSUPPORTED, "enum", "const"}.union(*_KEYWORDS_BY_TYPE.values())
    given = schema.get("type", "number")
    if given not in ("integer", "number") or not others.isdisjoint(schema):
        return None
    return NumberRange.of(schema, is_integer=given == "integer")


def _kinds(schema: Any) -> frozenset[str]:
    """Return the types that a schema allows at most."""
    given = schema.get("type", _TYPES) if isinstance(schema, Mapping) else _TYPES
    names = [given] if isinstance(given, str) else given
    return frozenset("number" if name == "integer" else name for name in names)


def _is_instance(value: object, rest: Mapping[str, Any]) -> bool:
    """Return whether a value has the type and is within the bounds beside an enum."""
    names = rest.get("type", _TYPES)
    names = [names] if isinstance(names, str) else names
    if isinstance(value, bool) or not isinstance(value, int | float):
        tests: dict[str, Callable[[], bool]] = {
            "null": lambda: value is None,
            "boolean": lambda: isinstance(value, bool),
            "string": lambda: isinstance(value, str),
            "array": lambda: isinstance(value, list),
            "object": lambda: isinstance(value, Mapping),
        }
        return any(name in tests and tests[name]() for name in names)
    return any(
        value in NumberRange.of(rest, is_integer=name == "integer")
        for name in names
        if name in ("integer", "number")
    )


def _cannot_keep(where: str) -> ConstraintError:
    return ConstraintError(
        f"the JSON schema has a number beyond 2**53 {where}, where it would be rounded; write it "
        "as a bound, a const or an enum of its own"
    )
