"""The stream helper of OpenAI's client gathers what is returned without a stream."""

import json

import pytest

from dsbd_ort import StreamPiece
from tests.openai_server.fakes import ScriptedService
from tests.openai_server.running_server import MODEL, running_server
from tests.openai_server.test_tools import MESSAGES, TOOLS

NAMED = {"type": "function", "function": {"name": "weather"}}
REQUIRED = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1200}
CHATS = {
    "text": {"max_tokens": 8},
    "two texts": {"max_tokens": 8, "n": 2},
    "scored": {"max_tokens": 8, "logprobs": True, "top_logprobs": 2},
    "required": REQUIRED,
    "of beams": {**REQUIRED, "extra_body": {"strategy": "dsbd", "num_beams": 4}},
    "one at most": {**REQUIRED, "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 400},
    "none": {"tools": TOOLS, "tool_choice": "none", "max_tokens": 8},
}


def said(answer):
    """Content, calls and the reason for the end of every choice; ids are drawn anew each time."""
    found = []
    for choice in answer.choices:
        calls = choice.message.tool_calls or ()
        assert all(call.id.startswith("call_") and call.type == "function" for call in calls)
        found.append(
            (
                choice.message.content or "",
                [(call.function.name, call.function.arguments) for call in calls],
                choice.finish_reason,
            )
        )
    return found


def scores_of(answer):
    """Log-probabilities of all tokens, each followed by those of the most probable ones."""
    scored = [each.logprobs for each in answer.choices if each.logprobs]
    tokens = [token for each in scored for token in each.content]
    return [each.logprob for token in tokens for each in (token, *token.top_logprobs)]


def gathered(client, fields):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, **fields) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot


@pytest.mark.parametrize("kind", CHATS)
def test_a_gathered_stream_is_the_answer(tool_server, kind):
    num_calls = set()
    with tool_server.client() as client:
        for seed in range(2):
            fields = {**CHATS[kind], "seed": seed}
            wanted = client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
            found = gathered(client, fields)
            assert said(found) == said(wanted)
            assert scores_of(found) == pytest.approx(scores_of(wanted), abs=1e-6)
            num_calls |= {len(calls) for _, calls, _ in said(found)}
            assert len(scores_of(found)) == (24 if kind == "scored" else 0)
    assert max(num_calls) >= {"required": 2, "one at most": 1, "named": 1}.get(kind, 0), (
        "one call or none in all"
    )


def test_calls_between_texts_are_gathered(tool_server):
    text = 'so:<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call> and '
    pieces = [*(text[at : at + 3] for at in range(0, len(text), 3)), text[3:], "."]

    def script():
        for piece in pieces:
            yield StreamPiece([65] * len(piece), piece, [-1.0] * len(piece))

    service = ScriptedService(tool_server.service.pipeline, script)
    with running_server(service) as scripted, scripted.client() as client:
        helper = client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS)
        with helper as stream:
            for event in stream:
                if event.type == "content.delta" and event.snapshot.endswith("and ."):
                    break
            message = stream.current_completion_snapshot.choices[0].message
    assert message.content == "so: and  and ."
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("now", '{"a": 1}')] * 2


SAYS_NOTHING = {"role", "content", "tool_calls", "id", "type", "name", "usage", "dsbd"}


def nulls_of(value):
    """Names of all fields of a JSON value that are null."""
    if isinstance(value, list):
        return set().union(*map(nulls_of, value))
    if not isinstance(value, dict):
        return set()
    own = {name for name, each in value.items() if each is None}
    return own.union(*map(nulls_of, value.values()))


@pytest.mark.parametrize("path", ["completions", *CHATS])
def test_an_event_leaves_out_what_it_does_not_say(tool_server, path):
    body = {"prompt": "def f(", "max_tokens": 8, "logprobs": 1}
    url = "/v1/completions"
    if path in CHATS:
        url, body = "/v1/chat/completions", {"messages": MESSAGES, **CHATS[path]}
        body |= body.pop("extra_body", {})
    body |= {"model": MODEL, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    lines = tool_server.http.post(url, json=body).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not nulls_of(events) & SAYS_NOTHING
    *texts, usage = events
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    assert [name for event in texts for name in event if name in ("usage", "dsbd")] == (
        ["dsbd"] * body.get("n", 1)  # with the last event of each choice
    )
    for event in texts:
        for choice in event["choices"]:
            assert choice["finish_reason"] is None or "dsbd" in choice
