"""Bodies that take seconds to read or to answer: meanwhile the server answers others.

All times are processor time of this process, so that they depend little on what else runs.
"""

import json
import threading
import time

import httpx2
import pytest

from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.item_requests import ResponsesBody
from tests.openai_server.running_server import MODEL

CHAT, COMPLETIONS, RESPONSES = "chat/completions", "completions", "responses"
TEXT = "def f(x): " * 80_000


def fields(*given):
    return f'{{"model": "{MODEL}", "max_tokens": 1, {", ".join(given)}}}'


def many(entry, number):
    return ", ".join([entry] * number)


def asked(content):
    return f'"messages": [{{"role": "user", "content": {content}}}]'


HOSTILE = {
    "a long chat": (CHAT, fields(asked(f'"{TEXT}"')), 400),
    "a long prompt": (COMPLETIONS, fields(f'"prompt": "{TEXT}"'), 400),
    "a long input": (RESPONSES, f'{{"model": "{MODEL}", "input": "{TEXT}"}}', 400),
    "a long prediction": (
        CHAT,
        fields(asked('"a"'), f'"prediction": {{"type": "content", "content": "{TEXT}"}}'),
        200,
    ),
    "many tokens and a text": (COMPLETIONS, fields(f'"prompt": [{many("5", 300_000)}, "a"]'), 400),
    "no messages": (CHAT, fields(f'"messages": [{many("1", 340_000)}]'), 400),
    "no parts": (CHAT, fields(asked(f"[{many('{}', 250_000)}]")), 400),
    "no tools": (CHAT, fields(asked('"a"'), f'"tools": [{many("{}", 250_000)}]'), 400),
    "no items": (RESPONSES, f'{{"model": "{MODEL}", "input": [{many("{}", 250_000)}]}}', 400),
    "no stop texts": (
        RESPONSES,
        f'{{"model": "{MODEL}", "input": "a", "stop": [{many("1", 340_000)}]}}',
        400,
    ),
    "many unknown fields": (
        CHAT,
        fields(asked("[{" + ", ".join(f'"x{i}": 1' for i in range(80_000)) + "}]")),
        400,
    ),
    "many log-probabilities": (
        COMPLETIONS,
        fields(
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


class Health:
    """A client that asks for /health all the time; ``longest``: the time without an answer."""

    def __init__(self, url):
        self.longest = 0.0
        self._url = url
        self._has_begun, self._is_ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        with httpx2.Client(base_url=self._url, timeout=60) as http:
            last = time.process_time()
            while not self._is_ending.wait(0.002):
                assert http.get("/health").status_code == 200
                self.longest = max(self.longest, -last + (last := time.process_time()))
                self._has_begun.set()

    def __enter__(self):
        self._thread.start()
        assert self._has_begun.wait(30)
        return self

    def __exit__(self, *_):
        self._is_ending.set()
        self._thread.join()


@pytest.mark.parametrize("name", HOSTILE)
def test_others_are_answered_while_a_body_takes_long(server, name):
    path, body, status = HOSTILE[name]
    assert len(body) < 2**20
    headers = {"Content-Type": "application/json"}
    begun = time.process_time()
    json.loads(body)
    parsing = time.process_time() - begun  # one call of a library, which stops all threads
    with Health(server.url) as health:
        begun = time.process_time()
        answer = server.http.post(f"/v1/{path}", content=body, headers=headers)
        seconds = time.process_time() - begun
    assert answer.status_code == status, answer.text[:500]
    assert health.longest < max(seconds / 3, 30 * parsing)
