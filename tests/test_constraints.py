"""Constraints on a bundle: every way of generating, every strategy, texts that are valid."""

import json
import re

import pytest

import dsbd_ort
from dsbd_ort import Service
from tests.constraints.json_schemas import SCHEMAS, check_document

PROMPT = "def settings():\n    return "
PAIRS = {
    "dsbd": "beam-sample",
    "speculative": "sample",
    "tree-speculative": "sample",
    "speculative-beam-search": "beam-search",
}
CONSTRAINTS = {
    "regex": dsbd_ort.Regex(r"[a-z]{2,6}( [0-9]{1,3}){1,2}"),
    "choice": dsbd_ort.Choice(["read", "write", "append", "read and write"]),
    "schema": dsbd_ort.JsonSchema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "size": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["name", "size"],
            "additionalProperties": False,
        }
    ),
    "lark": dsbd_ort.Lark('start: "[" item ("," item){0,3} "]"\nitem: /[a-c]{1,3}/'),
}


def tokens(result):
    return [sequence.token_ids for sequence in result.sequences]


def is_valid(name, text):
    if name == "regex":
        return re.fullmatch(r"[a-z]{2,6}( [0-9]{1,3}){1,2}", text) is not None
    if name == "choice":
        return text in ("read", "write", "append", "read and write")
    if name == "lark":
        return re.fullmatch(r"\[[a-c]{1,3}(,[a-c]{1,3}){0,3}\]", text) is not None
    value = json.loads(text)
    return set(value) == {"name", "size"} and 0 <= value["size"] <= 999 and len(value["name"]) <= 8


@pytest.mark.parametrize("strategy", [*PAIRS, "mjsd"])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_texts_are_valid_and_speculation_is_invisible(demo_pipe, name, strategy):
    options = {"constraint": CONSTRAINTS[name], "max_new_tokens": 48, "seed": 1}
    if "beam" in strategy or strategy == "dsbd":
        options |= {"num_beams": 3, "num_return_sequences": 3}
    result = demo_pipe.generate(PROMPT, strategy=strategy, **options)
    for sequence in result.sequences:
        assert sequence.finish_reason in ("stop", "eos")
        assert is_valid(name, sequence.text), sequence.text
    if strategy in PAIRS:
        assert tokens(demo_pipe.generate(PROMPT, strategy=PAIRS[strategy], **options)) == tokens(
            result
        )
        streamed = "".join(p.text for p in demo_pipe.stream(PROMPT, strategy=strategy, **options))
        assert streamed == result.sequences[0].text


def test_a_service_and_a_trie_and_a_function(demo_pipe):
    encode = demo_pipe.tokenizer.encode
    trie = dsbd_ort.TokenTrie.from_texts(["import os", "import re", "return None"], encode)
    digits = {token for digit in "0123456789" for token in encode(digit)}
    function = dsbd_ort.AllowedTokens(lambda path: sorted(digits), eos_token_ids=())
    for constraint, pattern in ((trie, "import os|import re|return None"), (function, "[0-9]+")):
        options = {"constraint": constraint, "max_new_tokens": 6, "seed": 2}
        alone = demo_pipe.generate(PROMPT, num_beams=2, **options)
        with Service(demo_pipe) as service:
            served = service.generate(PROMPT, num_beams=2, **options)
        assert re.fullmatch(pattern, served.sequences[0].text)
        assert tokens(served) == tokens(alone)


def check_schemas(pipe, num_requests, num_beams):
    """At least 99 % of the requests end, and all that end parse and validate."""
    num_ended = 0
    schemas = list(SCHEMAS.values())
    for seed in range(num_requests):
        schema = schemas[seed % len(schemas)]
        (sequence,) = pipe.generate(
            PROMPT,
            constraint=dsbd_ort.JsonSchema(schema),
            num_beams=num_beams,
            strategy="dsbd" if num_beams > 1 else "speculative",
            max_new_tokens=450,
            seed=seed,
        ).sequences
        if sequence.finish_reason != "length":
            num_ended += 1
            check_document(sequence.text, schema)
    assert num_ended >= 0.99 * num_requests


@pytest.mark.parametrize("num_beams", [1, 4])
def test_json_validates(demo_pipe, num_beams):
    check_schemas(demo_pipe, 20, num_beams)


@pytest.mark.long
@pytest.mark.parametrize("num_beams", [1, 4])
def test_500_requests_validate(demo_pipe, num_beams):
    check_schemas(demo_pipe, 500, num_beams)
