"""Schemas with integers beyond 2**53 against Python's integers and jsonschema."""

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pytest

from dsbd_ort.constraints import JsonSchema
from dsbd_ort.decoding.errors import ConstraintError
from tests.runtime.tiny_tokenizer import EOS, VOCAB_SIZE, tiny_tokenizer

CENTERS = [2**53, 2**62, 2**63 - 20, 10**18, 0, 100]
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
ABOVE = {"type": "integer", "minimum": 2**53 + 1}


@pytest.fixture(scope="module")
def accepts() -> Callable[[JsonSchema], Callable[[str], bool]]:
    """Return whether a schema lets a text through, by a matcher over bytes."""
    tiny = tiny_tokenizer()
    tokenizer = llguidance.LLTokenizer(
        tiny.to_str(), n_vocab=VOCAB_SIZE, eos_token=tiny.token_to_id(EOS)
    )

    def compiled(grammar: JsonSchema) -> Callable[[str], bool]:
        source = grammar.source(llguidance.LLMatcher)
        root = llguidance.LLMatcher(tokenizer, source, log_level=0)
        assert not root.is_error(), (root.get_error(), source)

        def accepts_text(text: str) -> bool:
            matcher = root.deep_copy()
            ids = tiny.encode(text, add_special_tokens=False).ids
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

        return accepts_text

    return compiled


def near(rng: random.Random) -> int:
    return rng.choice([-1, 1]) * (rng.choice(CENTERS) + rng.randint(-12, 12))


def random_range(rng: random.Random) -> dict[str, Any]:
    low, high = sorted((near(rng), near(rng)))
    schema: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.8:
        schema["minimum"] = low
    if rng.random() < 0.8:
        schema["maximum"] = high + 2
    return schema


def probes(rng: random.Random, schema: dict[str, Any], number: int = 12) -> list[int]:
    around = [value for value in schema.values() if isinstance(value, int)] + [0, near(rng)]
    exact = [value + step for value in around for step in range(-3, 4)]
    return exact + [rng.randint(-(2**66), 2**66) for _ in range(number)]


def check(accepts: Any, schema: dict[str, Any], documents: list[Any]) -> None:
    follows = accepts(JsonSchema(schema))
    validator = jsonschema.Draft202012Validator(schema)
    for document in documents:
        text = json.dumps(document, separators=(",", ":"))
        assert follows(text) == validator.is_valid(document), (schema, text)


@pytest.mark.parametrize("seed", range(40))
def test_random_bounds(accepts: Any, seed: int) -> None:
    rng = random.Random(seed)
    schema = random_range(rng)
    check(accepts, schema, probes(rng, schema))


def wrapped(inner: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return schemas in which ``inner`` lies at many places."""
    name = {"type": "string", "maxLength": 3}
    return {
        "property": {
            "properties": {"a": name, "id": inner, "b": name},
            "required": ["id"],
            "additionalProperties": False,
            "type": "object",
        },
        "property of any object": {"type": "object", "properties": {"id": inner}},
        "untyped property": {"properties": {"id": inner}, "required": ["id", "more"]},
        "map": {"type": "object", "properties": {"a": name}, "additionalProperties": inner},
        "items": {"type": "array", "items": inner, "minItems": 1, "maxItems": 3},
        "some items": {"type": "array", "items": inner},
        "any of": {"anyOf": [inner, name, {"type": "null"}]},
        "any of two ranges": {"anyOf": [inner, other]},
        "definition": {
            "$defs": {"id": inner, "list": {"type": "array", "items": {"$ref": "#/$defs/id"}}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/list"}, "id": {"$ref": "#/$defs/id"}},
        },
        "recursion": {
            "type": "object",
            "properties": {"id": inner, "more": {"$ref": "#"}},
            "additionalProperties": False,
        },
        "types": {**inner, "type": ["integer", "string", "null"]},
    }


PLACES = list(wrapped(INT64, UINT64))


def documents_for(value: int, more: int) -> list[Any]:
    lists = [[value], [value, "a"], [value, "a", more], ["a", value], [value] * 4, []]
    lists += [[2**63, {"k": 2**64 + 1}], [2**63, {"k": 2**64}]]
    objects = [{"id": value}, {"a": "x", "id": value}, {"id": value, "more": more}]
    objects += [{"id": value, "more": {"id": more}}, {"x": [value, more], "id": value}]
    return [value, *lists, *objects, {"y": value}, {"b": "y"}, {}, "a", None]


def is_in_order(schema: dict[str, Any], document: Any) -> bool:
    """Return whether properties have the order of the schema, others after them."""
    order = list(schema.get("properties", {}))
    keys = document if isinstance(document, dict) else []
    places = [order.index(key) if key in order else len(order) for key in keys]
    return places == sorted(places)


@pytest.mark.parametrize("place", PLACES)
def test_places(accepts: Any, place: str) -> None:
    rng = random.Random(place)
    for inner, other in ((INT64, UINT64), (ABOVE, INT64)):
        schema = wrapped(inner, other)[place]
        values = [*rng.sample(probes(rng, inner), 8), 2**53 + 1, 2**64 - 1, 7]
        documents = [
            document
            for value in values
            for document in documents_for(value, rng.choice(values))
            if is_in_order(schema, document)
        ]
        check(accepts, schema, documents)


@pytest.mark.parametrize("place", ["property", "map", "recursion"])
def test_layouts(accepts: Any, place: str) -> None:
    schema = wrapped(INT64, UINT64)[place]
    document = {
        "property": {"a": "x", "id": -(2**63)},
        "map": {"a": "x", "b": 2**63 - 1},
        "recursion": {"id": 1, "more": {"id": 2**62}},
    }[place]
    spaced = json.dumps(document)
    lines = json.dumps(document, indent=2)
    assert accepts(JsonSchema(schema, ", ", ": "))(spaced)
    assert accepts(JsonSchema(schema, flexible_whitespace=True))(lines)
    own = {**schema, "x-guidance": {"item_separator": ", ", "key_separator": ": "}}
    assert accepts(JsonSchema(own))(spaced)
    assert not accepts(JsonSchema(schema))(spaced)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": INT64}, "maximum 9223372036854775807 with or below 'not'.*leave it out"),
        ({"allOf": [INT64, {"type": "object"}]}, "with or below 'allOf'"),
        ({"oneOf": [INT64, UINT64]}, "with or below 'oneOf'"),
        ({**INT64, "multipleOf": 4096}, "with or below 'multipleOf'"),
        ({"type": "object", "patternProperties": {"^a": INT64}}, "'patternProperties'"),
        ({"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": INT64}}, "more than '.ref'"),
        ({"type": "integer", "maximum": 2**64}, "maximum 18446744073709551616, which"),
        ({"type": "integer", "minimum": -(2**63) - 1e5}, "minimum -9.22"),
        ({"type": "integer", "exclusiveMinimum": -(2**63)}, "exclusiveMinimum -9"),
        ({**INT64, "exclusiveMinimum": 0}, "with or below 'exclusiveMinimum'"),
        ({"type": "number", "maximum": 2**63 - 1}, "maximum 9223372036854775807, which"),
        ({"minimum": 2**53 + 1}, "minimum 9007199254740993, which"),
        ({"properties": {"a": {"const": {"b": [2**53 + 1]}}}}, "const 9007199254740993"),
        ({"enum": [1, -(2**63) - 1]}, "enum -9223372036854775809"),
        ({**INT64, "minimum": "0"}, "of a wrong type"),
        ({"anyOf": [INT64, 5]}, "of a wrong type"),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**59}, "allows no integer"),
        ({"properties": {"a": UINT64, "b": {"$ref": "#/properties/c"}, "c": {}}}, "not in '.defs'"),
    ],
)
def test_what_cannot_be_kept_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        JsonSchema(schema).source(llguidance.LLMatcher)


def test_schemas_without_large_numbers_are_the_librarys() -> None:
    schema = {"type": "integer", "maximum": 2**53 - 1, "default": 2**60 + 1, "enum": [2**50, 1e15]}
    source = json.loads(JsonSchema(schema).source(llguidance.LLMatcher))
    assert source["grammars"][0]["json_schema"]["maximum"] == 2**53 - 1
