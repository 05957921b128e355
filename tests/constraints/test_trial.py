"""The process that tries grammars: what ends it is refused, and the next grammar is tried."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dsbd_ort.constraints import GrammarTokenizer, JsonSchema, Lark, Regex, trial
from dsbd_ort.constraints.trial import MOST_CHARACTERS, GrammarTrial, GrammarTrialError
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
    with closing(tokenizer(is_guarded=True)) as made:
        yield made


def chain(num_rules: int, rule: str) -> Lark:
    """A grammar of so many rules, each of which names the next."""
    rules = [rule.format(this=f"r{i}", next=f"r{i + 1}") for i in range(num_rules)]
    return Lark("\n".join(["start: r0", *rules, f'r{num_rules}: "c"']))


LIMITS = f"{trial.MOST_SECONDS:g} s or {trial.MOST_BYTES >> 20} MiB"
TOO_MUCH = [
    JsonSchema({"type": "integer", "multipleOf": 999_983}),
    chain(5000, "{this}: {next}? {next}?"),
]


@pytest.mark.parametrize("grammar", TOO_MUCH, ids=["time", "time for rules"])
def test_what_takes_too_much_is_refused_and_the_next_is_tried(
    guarded: GrammarTokenizer, grammar: Lark | JsonSchema
) -> None:
    with pytest.raises(ConstraintError, match=f"takes more than {LIMITS} to compile"):
        guarded.constraint(grammar)
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
        (Regex("("), "the regex '(' is not a usable grammar: at 1"),
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
    with closing(tokenizer(is_guarded=True)) as made:
        for pattern in ("[ab]", "[cd]"):
            made.constraint(Regex(pattern))
            made.close()


def children(process_id: int) -> list[int]:
    """Return the processes that the main thread of a process has started."""
    text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(child) for child in text.split()]


def worker_of(made: GrammarTokenizer) -> int:
    assert made._trial is not None and made._trial._process is not None
    return made._trial._process.pid


@contextmanager
def most_descriptors(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_was_killed_is_replaced(guarded: GrammarTokenizer) -> None:
    guarded.constraint(Regex("[ab]{4}"))
    os.kill(worker_of(guarded), signal.SIGKILL)
    assert guarded.constraint(Regex("[ab]{5}")).start([]).shape == (1,)


@pytest.mark.parametrize("victim", ["the process", "its child"])
def test_a_grammar_whose_trial_was_killed_is_tried_again(
    guarded: GrammarTokenizer, victim: str
) -> None:
    def kill() -> None:
        while not (found := children(worker)):
            time.sleep(0.001)
        os.kill(worker if victim == "the process" else found[0], signal.SIGKILL)
        victims.append(victim)

    guarded.constraint(Regex(f"started before {victim}"))
    worker = worker_of(guarded)
    victims: list[str] = []
    killer = threading.Thread(target=kill)
    killer.start()
    slow = chain(2000 + len(victim), '{this}: "a" {next} | "b" {next}')
    assert guarded.constraint(slow).start([]).shape == (1,)
    killer.join()
    assert victims == [victim]


def test_many_open_files() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    copies: list[int] = []
    try:
        with most_descriptors(2048), closing(tokenizer(is_guarded=True)) as made:
            while not copies or copies[-1] < 1100:
                copies.append(os.dup(null))
            assert made.constraint(Regex("[ab]{6}")).start([]).shape == (1,)
    finally:
        for descriptor in (null, *copies):
            os.close(descriptor)


def test_no_descriptor_left() -> None:
    before = children(os.getpid())
    with closing(tokenizer(is_guarded=True)) as made:
        with most_descriptors(3), pytest.raises(GrammarTrialError, match="Too many open files"):
            made.constraint(Regex("[ab]{7}"))
        assert children(os.getpid()) == before
        assert made.constraint(Regex("[ab]{7}")).start([]).shape == (1,)


def test_a_process_that_cannot_begin_is_no_fault_of_the_grammar() -> None:
    before = children(os.getpid())
    with pytest.raises(GrammarTrialError, match="has ended before it was ready"):
        GrammarTrial("{}", 10, None).check("the regex 'a'", "start: /a/")
    assert children(os.getpid()) == before


def optional(number: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(number)}}


CROWDED = {
    "at the beginning": optional(200),
    "deep inside": {
        "$defs": {"many": optional(200)},
        "type": "object",
        "properties": {
            "a": {
                "type": "array",
                "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/many"}]},
            }
        },
    },
    "after required ones": {**optional(300), "required": [f"p{i}" for i in range(50)]},
}


@pytest.mark.parametrize("schema", CROWDED.values(), ids=CROWDED)
def test_what_would_fail_later_is_refused_at_the_start(
    guarded: GrammarTokenizer, schema: dict[str, object]
) -> None:
    """Without a trial too, for even more of what may follow."""
    unguarded = tokenizer(is_guarded=False)
    for each, what in ((guarded, schema), (unguarded, optional(600))):
        with pytest.raises(ConstraintError, match="too much may follow at one place"):
            each.constraint(JsonSchema(what))
