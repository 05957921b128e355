"""The process that tries grammars: what ends it is refused, and the next grammar is tried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsbd_ort.constraints import GrammarTokenizer, JsonSchema, Lark, Regex
from dsbd_ort.constraints.trial import MOST_CHARACTERS
from dsbd_ort.decoding.errors import ConstraintError
from tests.runtime.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer


def tokenizer(*, is_guarded: bool) -> GrammarTokenizer:
    return GrammarTokenizer(
        tiny_tokenizer().to_str(),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
        is_guarded=is_guarded,
    )


@pytest.fixture(scope="module")
def guarded() -> Iterator[GrammarTokenizer]:
    made = tokenizer(is_guarded=True)
    yield made
    made.close()


def chain(num_rules: int, rule: str) -> Lark:
    """A grammar of so many rules, each of which names the next."""
    rules = [rule.format(this=f"r{i}", next=f"r{i + 1}") for i in range(num_rules)]
    return Lark("\n".join(["start: r0", *rules, f'r{num_rules}: "c"']))


TOO_MUCH = {
    "time": JsonSchema({"type": "integer", "multipleOf": 999_983}),
    "time for rules": chain(5000, "{this}: {next}? {next}?"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_takes_too_much_is_refused_and_the_next_is_tried(
    guarded: GrammarTokenizer, name: str
) -> None:
    with pytest.raises(ConstraintError, match=r"takes more than 1 s or 1024 MiB to compile"):
        guarded.constraint(TOO_MUCH[name])
    assert guarded.constraint(Regex("[ab]{3}")).start([]).shape == (1,)


def test_rules_that_nest_deep_end_no_process(guarded: GrammarTokenizer) -> None:
    grammar = chain(6000, '{this}: "a" {next} | "b" {next}')
    for each in (guarded, tokenizer(is_guarded=False)):
        assert each.constraint(grammar).start([]).shape == (1,)


def test_a_huge_text_is_refused_unread(guarded: GrammarTokenizer) -> None:
    with pytest.raises(ConstraintError, match=f"expected at most {MOST_CHARACTERS}"):
        guarded.constraint(Regex("ab" * MOST_CHARACTERS))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Regex("("), "the regex '(' is no grammar that can be followed: at 1"),
        (JsonSchema({"$ref": "#"}), "it allows no text at all"),
        (Lark("start: x\nx: y\ny: x"), "it allows no text at all"),
        (JsonSchema({"type": "integer", "minimum": 2, "maximum": 1}), "minimum (2) is greater"),
        (JsonSchema({"dependencies": {}}), "dependencies"),
    ],
)
def test_faults_are_those_without_a_trial(
    guarded: GrammarTokenizer, grammar: Regex | Lark | JsonSchema, words: str
) -> None:
    messages = []
    for each in (guarded, tokenizer(is_guarded=False)):
        with pytest.raises(ConstraintError) as caught:
            each.constraint(grammar)
        messages.append(str(caught.value))
    assert words in messages[0] and messages[0] == messages[1]


def test_a_closed_trial_begins_again() -> None:
    made = tokenizer(is_guarded=True)
    try:
        for pattern in ("[ab]", "[cd]"):
            made.constraint(Regex(pattern))
            made.close()
    finally:
        made.close()
