"""Thirty hostile schemas and grammars: refused or compiled soon, while other requests go on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2

from tests.openai_server.running_server import MODEL

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


class Neighbour:
    """A client that sends one ordinary request after another."""

    def __init__(self, url):
        self.seconds = []
        self.statuses = set()
        self._url = url
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        body = {"model": MODEL, "prompt": "def f(", "max_tokens": 8, "seed": 1}
        with httpx2.Client(base_url=self._url, timeout=60) as http:
            while not self._is_ending.is_set():
                begun = time.monotonic()
                self.statuses.add(http.post("/v1/completions", json=body).status_code)
                self.seconds.append(time.monotonic() - begun)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_ending.set()
        self._thread.join()


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
        with Neighbour(server.url) as neighbour:
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
        with Neighbour(server.url) as neighbour:
            assert set(threads.map(status, PRIMES)) == {400}
        assert neighbour.statuses == {200}
        assert len(neighbour.seconds) > 2 * len(PRIMES) and max(neighbour.seconds) < 2.0
