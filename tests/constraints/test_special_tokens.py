"""Texts that read like special tokens: a constraint to them is one to plain text."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers

from dsbd_ort.constraints import Choice, GrammarTokenizer, JsonSchema, Lark, Regex
from tests.constraints.forest_of_states import random_text
from tests.runtime.tiny_tokenizer import EOS, tiny_tokenizer

NAMES = ["<|im_end|>", EOS, "<mask>", "<tool>", "[call]"]


@pytest.fixture(scope="module")
def tiny() -> tokenizers.Tokenizer:
    made = tiny_tokenizer()
    made.add_special_tokens(["<|im_end|>", tokenizers.AddedToken("<mask>", lstrip=True)])
    made.add_tokens(["<tool>", "[call]"])
    return made


@pytest.fixture(scope="module")
def bound(tiny: tokenizers.Tokenizer) -> GrammarTokenizer:
    return GrammarTokenizer(
        tiny.to_str(),
        vocab_size=tiny.get_vocab_size() + 3,  # a model may have more
        eos_token_ids=[tiny.token_to_id(EOS)],
    )


def grammars(name):
    """Grammars of one text or two, and these texts."""
    return [
        (Choice([name]), [name]),
        (Choice([name, f"{name}x"]), [name, f"{name}x"]),
        (Choice([f"a {name}{name} b"]), [f"a {name}{name} b"]),
        (Regex("".join(f"\\x{ord(character):02x}" for character in name)), [name]),
        (JsonSchema({"const": name}), [json.dumps(name)]),
        (JsonSchema({"enum": [name, f"<{name}"]}), [json.dumps(name), json.dumps(f"<{name}")]),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_plain_text(tiny, bound, name):
    for grammar, texts in grammars(name):
        tokens = random_text(grammar.bind(bound), np.random.default_rng(1))
        assert tiny.decode(tokens, skip_special_tokens=True) in texts, grammar


def test_a_lark_grammar_may_ask_for_the_token(tiny, bound):
    grammar = Lark('start: <|im_end|> "<|im_end|>"')
    tokens = random_text(grammar.bind(bound), np.random.default_rng(1))
    assert tokens[0] == tiny.token_to_id("<|im_end|>") not in tokens[1:]
    assert tiny.decode(tokens) == "<|im_end|>"
