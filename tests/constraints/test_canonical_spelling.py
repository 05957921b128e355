"""Grammars in the tokenizer's own spelling: what is left out, and that a text can always end."""

import pickle

import numpy as np
import pytest

from dsbd_ort.constraints import Canonical, Choice, JsonObject, JsonSchema, Regex, TokenTrie
from dsbd_ort.constraints.binding import constraint_from_data, kind_of
from dsbd_ort.constraints.grammar import after_spaces
from dsbd_ort.decoding.errors import ConstraintError
from tests.constraints.forest_of_states import (
    TOKENIZER,
    advanced,
    allowed_of,
    grammar_tokenizer,
    ids_of,
    random_text,
)

CLOSED = JsonSchema(
    {
        "type": "object",
        "properties": {
            "enabled": {"type": "boolean"},
            "tool": {"enum": ["search", "reply", "stop"]},
            "item": {"enum": ["paper", "pencil"]},
        },
        "required": ["enabled", "tool", "item"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer():
    return grammar_tokenizer()


def texts_of(constraint, count=40):
    """Return the tokens of random paths, each allowed token as likely as any other."""
    rng = np.random.default_rng(0)
    return [random_text(constraint, rng) for _ in range(count)]


def test_a_word_is_not_begun_in_a_token_that_it_is_not_written_with(tokenizer):
    begun = ids_of('{"enabled":')
    grammars = CLOSED.bind(tokenizer), Canonical(CLOSED).bind(tokenizer)
    plain, canonical = (allowed_of(c, advanced(c, c.start([]), begun)) for c in grammars)
    assert {TOKENIZER.id_to_token(token) for token in canonical} == {"true", "f"}  # f alse
    assert {"t", "true", "f"} <= {TOKENIZER.id_to_token(token) for token in plain}
    assert set(canonical) < set(plain)


def test_closed_documents_are_spelled_as_the_tokenizer_spells_them(tokenizer):
    plain, canonical = (
        [(tokens, ids_of(TOKENIZER.decode(tokens))) for tokens in texts_of(grammar.bind(tokenizer))]
        for grammar in (CLOSED, Canonical(CLOSED))
    )
    assert all(tokens == wanted for tokens, wanted in canonical)
    assert sum(tokens == wanted for tokens, wanted in plain) < 10  # or nothing is tested
    assert len({tuple(tokens) for tokens, _ in canonical}) == 12  # every document can be had


@pytest.mark.parametrize("pattern", ["t(rue|ry)", "p(aper|encil)", "true"])
def test_where_nothing_is_left_the_grammar_decides(tokenizer, pattern):
    """After a first letter that a caller may have forced, no token is the tokenizer's own."""
    grammar, constraint = Regex(pattern).bind(tokenizer), Canonical(Regex(pattern)).bind(tokenizer)
    path = [TOKENIZER.token_to_id(pattern[0])]
    found = allowed_of(constraint, advanced(constraint, constraint.start([]), path))
    wanted = allowed_of(grammar, advanced(grammar, grammar.start([]), path))
    assert len(wanted) and list(found) == list(wanted)


@pytest.mark.parametrize(
    "grammar", [Regex("[0-9]{1,4}-[0-9]{2}"), JsonObject(), Choice(["a", "ab", "abc", "é😀"])]
)
def test_every_text_is_one_of_the_grammar(tokenizer, grammar):
    plain, constraint = grammar.bind(tokenizer), Canonical(grammar).bind(tokenizer)
    for tokens in filter(None, texts_of(constraint, 20)):
        state = plain.start([])
        for token in tokens:
            assert token in allowed_of(plain, state)
            state = advanced(plain, state, [token])
        assert plain.accepts(state)[0]


def test_masks_of_many_paths_are_those_of_each(tokenizer):
    constraint = Canonical(CLOSED).bind(tokenizer)
    paths = [[], ids_of('{"'), ids_of('{"enabled":true,"tool":"')]
    states = np.concatenate([advanced(constraint, constraint.start([]), path) for path in paths])
    together = constraint.allowed(states).bits
    again = constraint.allowed(states).bits
    for row, path in enumerate(paths):
        alone = constraint.allowed(advanced(constraint, constraint.start([]), path)).bits[0]
        assert together[row].tolist() == alone.tolist() == again[row].tolist()
    assert constraint.has_ended(states).tolist() == [False] * 3


def test_it_is_plain_data():
    regex = Regex("[ab]")
    found = constraint_from_data({"regex": "[ab]", "canonical": True}, lambda _: None)
    assert found == Canonical(regex) and kind_of(found) == "regex"
    assert constraint_from_data({"regex": "[ab]", "canonical": False}, lambda _: None) == regex
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(Canonical(regex)) and found.name == regex.name
    with pytest.raises(ConstraintError, match=r"canonical 1; expected true or false"):
        constraint_from_data({"regex": "[ab]", "canonical": 1}, lambda _: None)


def test_after_spaces_it_is_still_canonical():
    assert after_spaces(Canonical(CLOSED), 0) == Canonical(CLOSED)
    assert after_spaces(Canonical(CLOSED), 1) == Canonical(after_spaces(CLOSED, 1))


def test_what_is_no_grammar_is_refused():
    trie = TokenTrie.from_sequences([[1, 2]])
    with pytest.raises(ConstraintError, match=r"Canonical got .*; give a grammar"):
        Canonical(trie)
