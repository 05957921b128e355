"""Specifications of grammars: what they let through, how they compare, what they refuse."""

import json
import pickle
import subprocess
import sys

import pytest

from dsbd_ort.constraints import Choice, FunctionCalls, JsonObject, JsonSchema, Lark, Regex
from dsbd_ort.decoding.errors import ConstraintError
from tests.constraints.forest_of_states import accepts_text, grammar_tokenizer

PAIR = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
ODD = ['a"b', "c\\d", "\n\t\r", "/", "\x7f", "😀é日", "(x|y)*", " "]
ODD += ["".join(map(chr, range(1, 32)))]


def compact(value):
    return json.dumps(value, separators=(",", ":"))


@pytest.fixture(scope="module")
def tokenizer():
    return grammar_tokenizer()


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (Regex("[0-9]{2}/a"), ["12/a"], ["12", "12/ab", "1/a", ""]),
        (Regex(""), [""], ["a"]),
        (Regex("a\nb"), ["a\nb"], ["ab"]),
        (Choice(["a", "ab", "b"]), ["a", "ab", "b"], ["", "aa", "ba"]),
        (Choice(["", "x"]), ["", "x"], ["xx"]),
        (Choice(ODD), ODD, ["a", "(x", "x"]),
        (Lark('start: "a" start "b" | "c"'), ["c", "acb", "aacbb"], ["acbb", "a"]),
        (JsonObject(), ["{}", '{"a":[1,{"b":null}]}'], ["[]", '{"a": 1}', '{"a":1', "{} "]),
        (JsonObject(", ", ": "), ['{"a": [1, 2]}'], ['{"a":[1,2]}']),
        (JsonObject(flexible_whitespace=True), ['{"a":1}', '{\n  "a" : 1\n}'], ["{"]),
        (JsonSchema({}), ["1", '"x"', "[true]", "{}"], ["", "tru"]),
        (JsonSchema(PAIR), ['{"b":1,"a":2}', '{"b":1}'], ['{"a":1,"b":2}', '{"b":1, "a":2}']),
        (JsonSchema(PAIR, item_separator=", "), ['{"b":1, "a":2}'], ['{"b":1,"a":2}']),
        (JsonSchema(PAIR, flexible_whitespace=True), ['{"b": 1,"a":2}'], ['{"a":2,"b":1}']),
        (
            JsonSchema({**PAIR, "x-guidance": {"key_separator": ": "}}),
            ['{"b": 1,"a": 2}'],
            ['{"b":1,"a":2}', '{"b": 1, "a": 2}'],
        ),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_texts_that_a_grammar_lets_through(tokenizer, grammar, texts, others):
    constraint = grammar.bind(tokenizer)
    assert [text for text in texts if not accepts_text(constraint, text)] == []
    assert [text for text in others if accepts_text(constraint, text)] == []


def schema_of(value, place=None, **more):
    """A schema whose only text is ``{"a":value}``; ``place`` refers to the definition of it."""
    return {
        "type": "object",
        "properties": {"a": {"$ref": place or "#/$defs/x"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"x": {"const": value, "$anchor": "x"}},
    } | more


DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DATA = {"$ref": "#/nowhere", "$id": "no uri %", "$anchor": "#"}
URI = {"$id": "https://e.x/a.json"}
BY_DEFINITIONS = {
    "type": "object",
    "$ref": "#/definitions/x",
    "definitions": {
        "x": {"properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}
    },
}
REFERRING = [  # schemas that refer to their own parts, in all the ways
    (schema_of("plain"), '{"a":"plain"}'),
    (schema_of("anchor", "#x"), '{"a":"anchor"}'),
    (schema_of("another", "#x"), '{"a":"another"}'),
    (schema_of("id", **URI), '{"a":"id"}'),
    (schema_of("same id", "#x", **URI), '{"a":"same id"}'),
    (schema_of("whole uri", "https://e.x/a.json#/$defs/x", **URI), '{"a":"whole uri"}'),
    (schema_of("relative", "a.json#x", **{"$id": "a.json"}), '{"a":"relative"}'),
    (schema_of(DATA, default=DATA, examples=[DATA]), f'{{"a":{compact(DATA)}}}'),
    ({**BY_DEFINITIONS, **DRAFT_4, "id": "http://e.x/1.json"}, '{"a":5}'),
    ({**BY_DEFINITIONS, **DRAFT_7}, '{"a":5}'),
    (
        {
            "type": "object",
            "properties": {"$ref": {"$ref": "#"}, "$id": {"enum": [DATA]}},
            "additionalProperties": False,
        },
        f'{{"$ref":{{"$id":{compact(DATA)}}}}}',
    ),
]


def test_schemas_of_calls_mean_what_they_mean_alone(tokenizer):
    alone = [JsonSchema(schema).bind(tokenizer) for schema, _ in REFERRING]
    functions = tuple((f"f{i}", JsonSchema(schema)) for i, (schema, _) in enumerate(REFERRING))
    calls = FunctionCalls(functions, 1).bind(tokenizer)
    for i, constraint in enumerate(alone):
        for _, text in REFERRING:
            call = f'[{{"name":"f{i}","arguments":{text}}}]'
            assert accepts_text(calls, call) == accepts_text(constraint, text), call
        assert accepts_text(constraint, REFERRING[i][1])


def test_calls_are_a_list_of_some(tokenizer):
    functions = tuple((name, JsonSchema({"enum": [{}]})) for name in ("f", "g.h-i_j"))
    f, g = ('{"name":"f","arguments":{}}', '{"name":"g.h-i_j","arguments":{}}')
    three, one = FunctionCalls(functions, 3).bind(tokenizer), FunctionCalls(functions, 1)
    for texts in ([f], [g], [f, g], [g, f, g]):
        assert accepts_text(three, f"[{','.join(texts)}]")
    assert accepts_text(one.bind(tokenizer), f"[{f}]")
    for text in ("[]", f"[{f}, {g}]", f"[{f},{f},{f},{f}]", f"[{f},]", f):
        assert not accepts_text(three, text)
    assert not accepts_text(one.bind(tokenizer), f"[{f},{f}]")


def test_a_choice_of_many(tokenizer):
    texts = [f"item {number:05d}" for number in range(20_000)]
    constraint = Choice(texts).bind(tokenizer)
    assert accepts_text(constraint, texts[12345])
    assert not accepts_text(constraint, "item 20000")


def test_specifications_compare_hash_and_pickle():
    made = [Regex("a"), Regex("b"), Choice(["a", "b"]), Choice(["b", "a"]), Lark("start: x")]
    made += [FunctionCalls((("f", JsonSchema({})),), most) for most in (1, 2)]
    made += [JsonObject(), JsonObject(flexible_whitespace=True)]
    made += [JsonSchema(PAIR), JsonSchema(PAIR, item_separator=", ")]
    assert len(set(made)) == len(made)
    for specification in made:
        assert pickle.loads(pickle.dumps(specification)) == specification
    assert Choice(["a", "b"]) == Choice(text for text in ("a", "b"))
    assert JsonSchema(PAIR) == JsonSchema(
        '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}'
    )
    reordered = {"type": "object", "properties": dict(reversed(PAIR["properties"].items()))}
    assert JsonSchema(PAIR) != JsonSchema(reordered)  # properties come in the order of the schema


def test_a_schema_that_changes_later_changes_nothing():
    schema = {"type": "string"}
    made = JsonSchema(schema)
    schema["type"] = "integer"
    assert made == JsonSchema({"type": "string"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regex(5), "a regex is 5; give a string"),
        (lambda: Regex("a\ud800"), "a regex, 'a.*, has a lone surrogate"),
        (lambda: Choice([]), r"the choice is \[\]; give a list"),
        (lambda: Choice("abc"), "the choice is 'abc'; give a list"),
        (lambda: Choice(["a", 5]), "a text of a choice is 5; give a string"),
        (lambda: Lark(None), "a Lark grammar is None; give a string"),
        (lambda: JsonSchema("nope"), "the JSON schema 'nope' is not valid JSON: Expecting value"),
        (lambda: JsonSchema("[1]"), r"the JSON schema '\[1\]' is not an object"),
        (lambda: JsonSchema(True), "the JSON schema 'true' is not an object"),
        (lambda: JsonSchema({"a": object()}), "is not valid JSON: .*object"),
        (lambda: JsonSchema({"minimum": float("nan")}), "is not valid JSON: Out of range float"),
    ],
)
def test_senseless_specifications_are_refused(make, message):
    with pytest.raises(ConstraintError, match=message):
        make()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Regex("[0-9"), r"the regex '\[0-9' .*unclosed character class"),
        (Regex("(?=a)b"), r"the regex '\(\?=a\)b' .*look-around"),
        (Regex("[a--a]b"), r"the regex '\[a--a\]b' is not a usable grammar"),
        (Lark("start: foo"), "the Lark grammar 'start: foo' .*unknown name"),
        (JsonSchema({"type": "foo"}), "the JSON schema .*Invalid type: foo"),
        (JsonSchema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ."uniqueItems"'),
        (JsonSchema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable schema"),
        (JsonSchema({"$ref": "#/$defs/x"}), "the JSON schema .*does not exist"),
        (JsonSchema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "exactly one .* anyOf"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_invalid_grammars_name_themselves(tokenizer, grammar, message):
    with pytest.raises(ConstraintError, match=message) as error:
        grammar.bind(tokenizer)
    assert "\n" not in str(error.value)


def test_grammars_without_llguidance():
    code = """
import sys
sys.modules["llguidance"] = None
from dsbd_ort.constraints import GrammarTokenizer, Regex
Regex("a")
try:
    GrammarTokenizer("{}", vocab_size=1, eos_token_ids=[])
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("ConstraintError grammars need a package that is not installed")
    assert "pip install" in done.stdout and "'.[grammar]'" in done.stdout
