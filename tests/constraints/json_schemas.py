"""Twenty JSON schemas whose texts are bounded, of the kinds that requests have."""

import json
from decimal import Decimal
from typing import Any

import jsonschema

NAME = {"type": "string", "maxLength": 8}
AGE = {"type": "integer", "minimum": 0, "maximum": 150}

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": NAME, "age": AGE},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": AGE, "b": AGE, "c": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "empty object": {"type": "object", "additionalProperties": False},
    "array of enums": {"type": "array", "items": {"enum": ["red", "green", "b"]}, "maxItems": 4},
    "array of at least two": {"type": "array", "items": AGE, "minItems": 2, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, AGE, {"type": "null"}],
        "items": False,
        "minItems": 3,
    },
    "enum of all kinds": {"enum": ["x", 1, -2.5, None, True, [1, "y"], {"k": "v"}]},
    "const": {"const": {"kind": "tool", "id": 17}},
    "integer range": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "number range": {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.01},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": 5},
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {
                    "name": NAME,
                    "tags": {"type": "array", "items": NAME, "maxItems": 2},
                },
                "required": ["name", "tags"],
                "additionalProperties": False,
            },
            "at": {
                "type": "array",
                "items": {"type": "array", "items": AGE, "maxItems": 2},
                "maxItems": 2,
            },
        },
        "required": ["who", "at"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": AGE, "y": AGE},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "unicode": {
        "type": "object",
        "properties": {"größe": AGE, "名前": {"enum": ["太郎", "😀", "naïve"]}},
        "required": ["größe", "名前"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "unicode pattern": {"type": "string", "pattern": "^[äöü€]{1,4}$"},
    "bounded string": {"type": "string", "minLength": 3, "maxLength": 5},
    "any of": {"anyOf": [AGE, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    "format": {"type": "string", "format": "uuid"},
    "string or its escapes": {"type": "string", "enum": ['a"b', "back\\slash", "new\nline", "/"]},
}


def check_document(text: str, schema: dict[str, Any]) -> None:
    """Raise unless ``text`` is a JSON document that ``schema`` allows.

    Numbers are read as decimals: in floats 0.57 is no multiple of 0.01.
    """
    exact_schema = json.loads(json.dumps(schema), parse_float=Decimal)
    jsonschema.validate(json.loads(text, parse_float=Decimal), exact_schema)
