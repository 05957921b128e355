"""Texts that read like special tokens are plain text to a constraint; bytes of tokens."""

import json

import numpy as np
import pytest
import tokenizers

from dsbd_ort.constraints import Choice, GrammarTokenizer, JsonSchema, Lark, Regex
from tests.constraints.forest_of_states import random_text
from tests.runtime.tiny_tokenizer import EOS, tiny_tokenizer
from tests.runtime.tokenizer_kinds import KINDS, SPECIAL, saved

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


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_plain_text(tiny, bound, name):
    grammars = [  # of one text or two, and these texts
        (Choice([name]), [name]),
        (Choice([name, f"{name}x"]), [name, f"{name}x"]),
        (Choice([f"a {name}{name} b"]), [f"a {name}{name} b"]),
        (Regex("".join(f"\\x{ord(character):02x}" for character in name)), [name]),
        (JsonSchema({"const": name}), [json.dumps(name)]),
        (JsonSchema({"enum": [name, f"<{name}"]}), [json.dumps(name), json.dumps(f"<{name}")]),
    ]
    for grammar, texts in grammars:
        tokens = random_text(grammar.bind(bound), np.random.default_rng(1))
        assert tiny.decode(tokens, skip_special_tokens=True) in texts, grammar


def test_a_lark_grammar_may_ask_for_the_token(tiny, bound):
    grammar = Lark('start: <|im_end|> "<|im_end|>"')
    tokens = random_text(grammar.bind(bound), np.random.default_rng(1))
    assert tokens[0] == tiny.token_to_id("<|im_end|>") not in tokens[1:]
    assert tiny.decode(tokens) == "<|im_end|>"


READ = ["tiny_tokenizer", "byte_level_bpe", "byte_fallback_bpe", "llama_2", "unigram"]


@pytest.mark.parametrize("kind", READ)
def test_grammars_see_the_bytes_that_a_token_adds(tmp_path, kind):
    backend = KINDS[kind]()
    tokenizer, size = saved(backend, tmp_path), backend.get_vocab_size()
    ends = [] if (end := backend.token_to_id(SPECIAL)) is None else [end]
    read = GrammarTokenizer(backend.to_str(), vocab_size=size, eos_token_ids=ends)
    special = {t for t, added in backend.get_added_tokens_decoder().items() if added.special}
    for token in set(range(size)) - special:
        content = tokenizer.bytes_of(token)
        if content != b"\xff":  # which the library shows of no token
            assert read._tokenizer.decode_bytes([token]) == content
