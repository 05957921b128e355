"""Bodies and constraints that take seconds to read or to answer: others are answered meanwhile.

Times of bodies are processor time of this process, so that they depend little on what else runs.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.item_requests import ResponsesBody
from tests.openai_server.running_server import MODEL


class Neighbour:
    """A client that sends one ordinary request after another.

    Attributes:
        seconds: how long each took, by a clock.
        statuses: of all answers.
    """

    def __init__(self, url, ask, clock=time.monotonic):
        self.seconds, self.statuses = [], set()
        self._url, self._ask, self._clock = url, ask, clock
        self._has_begun, self._is_ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        with httpx2.Client(base_url=self._url, timeout=60) as http:
            last = self._clock()
            while not self._is_ending.wait(0.002):
                self.statuses.add(self._ask(http).status_code)
                self.seconds.append(-last + (last := self._clock()))
                self._has_begun.set()

    def __enter__(self):
        self._thread.start()
        assert self._has_begun.wait(30)
        return self

    def __exit__(self, *_):
        self._is_ending.set()
        self._thread.join()


def completed(http):
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": 8, "seed": 1}
    return http.post("/v1/completions", json=body)


CHAT, COMPLETIONS, RESPONSES = "chat/completions", "completions", "responses"
TEXT = "def f(x): " * 80_000


def body_of(*given):
    return f'{{"model": "{MODEL}", "max_tokens": 1, {", ".join(given)}}}'


def many(entry, number):
    return ", ".join([entry] * number)


def asked(content):
    return f'"messages": [{{"role": "user", "content": {content}}}]'


BODIES = {
    "a long chat": (CHAT, body_of(asked(f'"{TEXT}"')), 400),
    "a long prompt": (COMPLETIONS, body_of(f'"prompt": "{TEXT}"'), 400),
    "a long input": (RESPONSES, f'{{"model": "{MODEL}", "input": "{TEXT}"}}', 400),
    "a long prediction": (
        CHAT,
        body_of(asked('"a"'), f'"prediction": {{"type": "content", "content": "{TEXT}"}}'),
        200,
    ),
    "many tokens and a text": (COMPLETIONS, body_of(f'"prompt": [{many("5", 300_000)}, "a"]'), 400),
    "no messages": (CHAT, body_of(f'"messages": [{many("1", 340_000)}]'), 400),
    "no parts": (CHAT, body_of(asked(f"[{many('{}', 250_000)}]")), 400),
    "no tools": (CHAT, body_of(asked('"a"'), f'"tools": [{many("{}", 250_000)}]'), 400),
    "no items": (RESPONSES, f'{{"model": "{MODEL}", "input": [{many("{}", 250_000)}]}}', 400),
    "no stop texts": (
        RESPONSES,
        f'{{"model": "{MODEL}", "input": "a", "stop": [{many("1", 340_000)}]}}',
        400,
    ),
    "many unknown fields": (
        CHAT,
        body_of(asked("[{" + ", ".join(f'"x{i}": 1' for i in range(80_000)) + "}]")),
        400,
    ),
    "many log-probabilities": (
        COMPLETIONS,
        body_of(
            f'"prompt": [{many("5", 2000)}], "n": 16, "temperature": 0',
            '"echo": true, "logprobs": 20',
        ),
        200,
    ),
}


def lists_of(schema):
    """Yield the lists in a schema of pydantic-core whose entries may be invalid."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and schema["items_schema"]["type"] != "any":
            yield schema
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        yield from lists_of(each)


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody])
def test_every_list_reports_its_first_invalid_entry_alone(body):
    assert all(each["fail_fast"] for each in lists_of(body.__pydantic_core_schema__))


@pytest.mark.parametrize("name", BODIES)
def test_others_are_answered_while_a_body_takes_long(server, name):
    path, body, status = BODIES[name]
    assert len(body) < 2**20
    headers = {"Content-Type": "application/json"}
    begun = time.process_time()
    json.loads(body)
    parsing = time.process_time() - begun  # one call of a library, which stops all threads
    with Neighbour(server.url, lambda http: http.get("/health"), time.process_time) as health:
        begun = time.process_time()
        answer = server.http.post(f"/v1/{path}", content=body, headers=headers)
        seconds = time.process_time() - begun
    assert answer.status_code == status, answer.text[:500]
    assert health.statuses == {200} and max(health.seconds) < max(seconds / 3, 30 * parsing)


MOST_SECONDS = 20.0  # of wall time, on a machine with much else to do; of processor time it is 1
PRIMES = (999_983, 999_979, 999_961, 999_959, 999_953, 999_931)
MOST_GROWTH = 400 << 20


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


def referring(**definitions):
    return {"$defs": definitions, "$ref": f"#/$defs/{next(iter(definitions))}"}


def rules(num_rules, rule):
    lines = [rule.format(this=f"r{i}", next=f"r{i + 1}") for i in range(num_rules)]
    return "\n".join(["start: r0", *lines, f'r{num_rules}: "c"'])


def names(number):
    return [f"p{index * 7919 % 1_000_003}" for index in range(number)]


SCHEMAS = {
    "5,000 required properties": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names(5000)},
        "required": names(5000),
    },
    "20,000 properties": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names(20_000)},
    },
    "60,000 values": {"enum": names(60_000)},
    "nested 60 deep": nested(60),
    "nested 400 deep": nested(400),
    "doubled 12 times": doubled(12),
    "8 to the 20th": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(8)]}
            for i in range(20)
        ]
    },
    "recursion without an end": referring(
        n={"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    ),
    "a reference to itself": referring(n={"$ref": "#/$defs/n"}),
    "two references to each other": referring(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}),
    "itself and more": referring(n={"allOf": [{"$ref": "#/$defs/n"}, {"type": "object"}]}),
    "a reference to elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "an empty range": {"type": "integer", "minimum": 10, "maximum": 1},
    "two types at once": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "nothing for a required key": {
        "type": "object",
        "properties": {"a": False},
        "required": ["a"],
    },
    "a billion characters": {"type": "string", "minLength": 10**9},
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "a large prime": {"type": "integer", "multipleOf": 999_983},
    "a tiny multiple": {"type": "number", "multipleOf": 1e-12},
    "a pattern of choices": {"type": "string", "pattern": "^(a|a)*b(.|a){200}$"},
    "look-ahead": {"type": "string", "pattern": "^(?=a)b$"},
}
REGEXES = {
    "counts of counts": "((a{1,100}){1,100}){1,100}",
    "stars of stars": "(a*)*" * 50 + "b",
    "a state for every path": "(a|b)*a(a|b){300}",
    "5,000 brackets": "(" * 5000 + "a" + ")" * 5000,
    "nothing": r"[^\s\S]",
}
GRAMMARS = {
    "ambiguous": 'start: s\ns: s s | s s s | "a" | ',
    "no end": 'start: x\nx: "a" x',
    "5,000 rules deep": rules(5000, '{this}: "a" {next} | "b" {next}'),
    "5,000 that may be empty": rules(5000, "{this}: {next}? {next}?"),
    "a thousand thousands": 'start: ("a"{1,1000}){1,1000}',
}
HOSTILE = [
    *((name, {"guided_json": schema}) for name, schema in SCHEMAS.items()),
    *((name, {"guided_regex": pattern}) for name, pattern in REGEXES.items()),
    *((name, {"guided_grammar": grammar}) for name, grammar in GRAMMARS.items()),
]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_tokenizer_of_grammars_is_read_before_the_first_request(serve):
    with serve() as server:
        made = server.service.pipeline.constraints._tokenizer
        assert made is not None and made._trial._process is not None


def test_thirty_hostile_constraints(serve):
    assert len(HOSTILE) >= 30
    with serve() as server, httpx2.Client(base_url=server.url, timeout=60) as http:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 20, "seed": 1}
        assert http.post("/v1/completions", json={**body, "guided_regex": "a"}).status_code == 200
        before = resident_bytes()
        with Neighbour(server.url, completed) as neighbour:
            for name, fields in HOSTILE:
                begun = time.monotonic()
                answer = http.post("/v1/completions", json={**body, **fields})
                seconds = time.monotonic() - begun
                assert seconds < MOST_SECONDS, (name, seconds)
                assert answer.status_code in (200, 400), (name, answer.text)
                if answer.status_code == 400:
                    message = answer.json()["error"]["message"]
                    assert 20 < len(message) <= 500, (name, message)
        assert neighbour.statuses == {200}
        assert max(neighbour.seconds) < 2.0, sorted(neighbour.seconds)[-3:]
        assert resident_bytes() - before < MOST_GROWTH


def test_many_at_a_time_hold_up_no_others(serve):
    def status(prime):
        schema = {"type": "integer", "multipleOf": prime}
        body = {"model": MODEL, "prompt": "a", "guided_json": schema}
        return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code

    with serve() as server, ThreadPoolExecutor(len(PRIMES)) as threads:
        with Neighbour(server.url, completed) as neighbour:
            assert set(threads.map(status, PRIMES)) == {400}
        assert neighbour.statuses == {200}
        assert len(neighbour.seconds) > 2 * len(PRIMES) and max(neighbour.seconds) < 2.0
