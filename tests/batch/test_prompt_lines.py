"""Lines of the input: requests, hashes and seeds; a hostile line has one answer or one error."""

import json
import pickle
import random
import string
from dataclasses import dataclass

import pytest

from dsbd_ort.batch.answer_sources import (
    Answers,
    AnswerSource,
    Backlog,
    MayStop,
    SharedCalls,
    Workers,
    answers_in_order,
    one_after_another,
)
from dsbd_ort.batch.job import Batch, run_batch
from dsbd_ort.batch.prompt_lines import (
    BatchError,
    LineAnswer,
    RawLine,
    parsed_object,
    prompt_line,
    read_lines,
)
from dsbd_ort.cluster.replica import Replica
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.noise import sample_seed
from dsbd_runtime.errors import InputError
from tests.batch.test_job import batch_of, console

DEPTHS = [1, 60, 200, 480, 700, 940, 980, 1000, 20_000]
NESTED = [b"[" * depth + b"]" * depth for depth in DEPTHS] + [
    b'{"a":' * depth + b"1" + b"}" * depth for depth in DEPTHS
]
NUMBERS = [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e308", b"9" * 5000, b"-0.0"]
TEXTS = [rb'"\ud800"', b'"\xed\xa0\x80"', rb'"\u0000"', b'"\xf0\x9f\x98\x80"', b'""', b'"\xff"']
ODD = [*NESTED, *NUMBERS, *TEXTS, b"null", b"true", b"[]", b"{}", b"[1,[2]]", b'"4"', b"7", b"-1"]
OPTIONS = [name.encode() for name in DecodingConfig.__dataclass_fields__]
NO_OBJECTS = [b"1", b'"x"', b"[]", b"null", b"nul", b"{", b"}", b"\0", b'{"a" 1}', b"\xff\xfe{}"]
LARGE = [
    b'{"id": "large", "prompt": "' + b"a" * 100_000 + b'"}',
    b'{"id": "large", "prompt": "a", "x": "' + b"a" * 10_000_000 + b'"}',
    b'{"id": "large", "prompt": [' + b"1," * 100_000 + b"1]}",
    b'{"id": "large", "' + b"k" * 1_000_000 + b'": 1}',
    b'{"id": "large", "messages": [' + b"{}," * 50_000 + b"{}]}",
    b'{"id": "' + b"i" * 1_000_000 + b'", "prompt": 1}',
    b'{"id": "large", "x": "' + b'\\"[' * 100_000 + b'", "messages": ' + NESTED[-1] + b"}",
]


def hostile_lines(rng: random.Random) -> list[bytes]:
    """Every odd value as an id, a prompt and messages; some as options, twice, and damaged."""
    lines = [b'{"id": %s, "prompt": "a"}' % value for value in ODD]
    lines += [b'{"id": "p", "prompt": %s}' % value for value in ODD]
    lines += [b'{"id": "m", "messages": %s}' % value for value in ODD]
    lines += [b'{"id": "r", "messages": [{"role": %s}]}' % value for value in ODD]
    lines += [b'{"id": "o", "prompt": "a", "%s": %s}' % (name, rng.choice(ODD)) for name in OPTIONS]
    lines += [b'{"id": "o", "prompt": "a", "%s": %s}' % (name, rng.choice(ODD)) for name in OPTIONS]
    lines += [b'{"id": 1, "id": %s, "prompt": "a"}' % rng.choice(ODD) for _ in range(10)]
    lines += [*NO_OBJECTS, *LARGE]
    for line in rng.sample(lines, 40):
        place = rng.randrange(len(line))
        line = line[:place] + bytes([rng.choice(b'[]{}",:\\0\xff')]) + line[place + 1 :]
        lines.append(line)
    lines = [line for line in lines if line.strip()]
    rng.shuffle(lines)
    return [b'{"id": "first", "prompt": "a"}', *lines, b'{"id": "last", "prompt": "a"}']


def strict(text: str) -> dict[str, object]:
    """Parse JSON as other programs do."""

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    fields = json.loads(text, parse_constant=refuse)
    assert isinstance(fields, dict)
    return fields


def answered(batch: Batch) -> list[dict[str, object]]:
    assert run_batch(batch, console()) == 0
    return [strict(line) for line in batch.output.read_text().split("\n")[:-1]]


class ReplicasHere:
    """The work of a cluster without one: answers go through pickle."""

    def __call__(self, backlog: Backlog) -> Answers:
        replica = Replica(backlog.settings, backlog.fingerprint)

        def ask(member: Replica, line: RawLine, may_stop: MayStop) -> LineAnswer:
            answer = member.answer(pickle.loads(pickle.dumps(line)))
            return pickle.loads(pickle.dumps(answer))  # type: ignore[no-any-return]

        yield from answers_in_order([replica], ask, backlog)


class _StopError(Exception):
    """The batch stops here; the same command goes on with it."""


@dataclass(frozen=True)
class Stopping:
    """A source that ends in an error after some answers."""

    source: AnswerSource
    num_answers: int

    def __call__(self, backlog: Backlog) -> Answers:
        answers = self.source(backlog)
        try:
            for number, answer in enumerate(answers):
                if number == self.num_answers:
                    raise _StopError
                yield answer
        finally:
            answers.close()


SOURCES = {
    "plain": (one_after_another, 3),
    "concurrency": (SharedCalls(4), 3),
    "workers": (Workers(2), 1),
    "replicas": (ReplicasHere(), 1),
}


@pytest.mark.parametrize("mode", SOURCES)
def test_every_hostile_line_has_one_answer_however_often_the_batch_stops(
    tiny_bundle, tmp_path, mode
):
    source, num_stops = SOURCES[mode]
    rng = random.Random(mode)
    lines = hostile_lines(rng)
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    options = {"max_new_tokens": 1, "num_beams": 1}
    for _ in range(num_stops):
        stopping = Stopping(source, rng.randrange(1, len(lines) // (num_stops + 1)))
        with pytest.raises(_StopError):
            run_batch(batch_of(tmp_path, tiny_bundle, source=stopping, options=options), console())
    found = answered(batch_of(tmp_path, tiny_bundle, source=source, options=options))
    assert [answer["line"] for answer in found] == list(range(1, len(lines) + 1))
    assert found[0]["id"] == "first" and found[-1]["id"] == "last"
    assert "error" not in found[0] and "error" not in found[-1]
    for answer, line in zip(found, lines, strict=True):
        if line.startswith(b'{"id": "p"') and line.endswith(b"}"):
            assert answer.get("id", "p") == "p"
        if "error" in answer:
            assert len(str(answer["error"])) <= 1000
            assert "internal error" not in str(answer["error"]), line[:200]


ECHOED = [  # (line, its id or None where it cannot be repeated, words of its error)
    (b'{"id": %s, "prompt": ""}' % (b"[" * 60 + b"]" * 60), 60, "prompt has no token"),
    (b'{"id": %s, "prompt": "a"}' % (b"[" * 940 + b"]" * 940), None, "id is nested deeper than"),
    (b'{"id": %s, "prompt": "a"}' % NESTED[8], None, "the line is nested deeper than 64 levels"),
    (b'{"id": NaN, "prompt": "a"}', None, "id holds nan, which JSON does not have"),
    (b'{"id": [1, {"a": 1e400}], "prompt": "a"}', None, "id holds inf, which JSON"),
    (b'{"id": %s, "prompt": "a"}' % (b"9" * 5000), None, "the line is invalid JSON (Exceeds"),
    (b'{"id": 7, "prompt": "a", "temperature": NaN}', 7, "temperature holds nan, which JSON"),
    (b'{"id": 7, "messages": %s}' % (b"[" * 940 + b"]" * 940), 7, "messages is nested deeper"),
    (
        b'{"id": {"a": {"a": 1e5}}, "prompt": "a", "beams": 2}',
        {"a": {"a": 1e5}},
        "the line has 'beams'",
    ),
]


@pytest.mark.parametrize(("line", "echo", "words"), ECHOED, ids=range(len(ECHOED)))
def test_an_id_is_echoed_where_it_can_be(tiny_bundle, tmp_path, line, echo, words):
    (tmp_path / "in.jsonl").write_bytes(line)
    batch = batch_of(tmp_path, tiny_bundle, options={"max_new_tokens": 1, "num_beams": 1})
    (answer,) = answered(batch)
    assert words in str(answer["error"])
    if echo == 60:
        assert json.dumps(answer["id"]) == "[" * 60 + "]" * 60
    else:
        assert answer.get("id") == echo and ("id" in answer) is (echo is not None)


@pytest.mark.parametrize("seed", range(20))
def test_random_values_are_echoed_as_they_are(tiny_bundle, tmp_path, seed):
    rng = random.Random(seed)
    alphabet = string.printable + "\0\ud800\udfff\u2028é😀"

    def value(depth: int) -> object:
        kind = rng.randrange(8 if depth < 60 else 6)
        if kind == 6:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {text(): value(depth + 1) for _ in range(rng.randrange(3))}
        return [text(), rng.randrange(-(10**30), 10**30), rng.random(), True, None, 10**4000][kind]

    def text() -> str:
        return "".join(rng.choices(alphabet, k=rng.randrange(9)))

    ids = [value(rng.randrange(60)) for _ in range(20)]
    lines = [json.dumps({"id": id, "prompt": 0}) + "\n" for id in ids]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    parsed = [json.loads(json.dumps(id)) for id in ids]  # two surrogates may be one character
    found = answered(batch_of(tmp_path, tiny_bundle))
    assert [answer["id"] for answer in found] == parsed


def test_lines_are_numbered_and_blank_ones_are_no_requests(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": 2}')
    assert list(read_lines(file)) == [RawLine(1, b'{"a": 1}'), RawLine(4, b'{"b": 2}')]


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(BatchError, match=r"--input .*nothing\.jsonl cannot be read: No such file"):
        list(read_lines(tmp_path / "nothing.jsonl"))


def test_options_of_a_line():
    line = prompt_line({"prompt": "a", "id": 7, "num_beams": 2, "stop_strings": ["x"]})
    assert line.prompt == "a" and line.messages is None
    assert line.options == {"num_beams": 2, "stop_strings": ["x"]}
    assert prompt_line({"messages": [1]}).messages == [1]
    assert prompt_line({"ids": [1, 2]}).ids == [1, 2]


REFUSED = [
    (b"{", "is invalid JSON"),
    (b"\xff", "is invalid JSON"),
    (b"[" * 100_000, "is nested deeper than 64 levels"),
    (b"[1]", "is a JSON list"),
    (b"{}", "neither prompt, ids nor messages"),
    (b'{"prompt": "a", "messages": []}', "prompt and messages"),
    (b'{"prompt": 7}', "prompt is 7; expected a text"),
    (b'{"messages": "a"}', "messages is 'a'; expected a list"),
    (b'{"ids": [1], "prompt": "a"}', "prompt and ids"),
    (b'{"ids": [1, true]}', r"ids is \[1, True\]; expected a list of token ids"),
    (b'{"ids": "1,2"}', "ids is '1,2'; expected a list of token ids"),
    (b'{"prompt": "a", "beams": 2}', "the line has 'beams'; did you mean 'num_beams'"),
    (b'{"prompt": "a", "x": 2}', "'x'; expected id, prompt, ids or messages, or a field of"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED, ids=lambda value: repr(value[:20]))
def test_what_is_no_request_is_named(content, words):
    with pytest.raises(InputError, match=words):
        prompt_line(parsed_object(content))


def test_hash_and_seed_depend_on_what_they_should():
    line = RawLine(3, b"{}")
    assert line.request_hash("s") == RawLine(3, b"{}").request_hash("s")
    others = [RawLine(4, b"{}"), RawLine(3, b"[]")]
    hashes = {raw.request_hash("s") for raw in [line, *others]} | {line.request_hash("t")}
    assert len(hashes) == 4
    seeds = {RawLine(number, b"").seed(seed) for number in range(50) for seed in range(4)}
    assert len(seeds) == 200 and max(seeds) < 2**53
    assert line.seed(5) == RawLine(3, b"other").seed(5) == sample_seed(5, 3)
