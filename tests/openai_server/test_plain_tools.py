"""Tools as plain text: what a model without a form of its own reads, and which servers offer it."""

import json
import logging
from pathlib import Path

import openai
import pytest

from dsbd_ort.openai_server.plain_tools import (
    as_text,
    offer,
    with_system_text,
    with_user_text,
)
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_runtime.errors import InputError
from tests.openai_server.conftest import CHAT_TEMPLATE, TOOL_TEMPLATE, num_prompt_tokens
from tests.openai_server.running_server import MODEL
from tests.runtime.bundle_edits import with_files

NOW = {"name": "now", "description": "the time", "parameters": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": NOW},
    {"type": "function", "function": {"name": "f"}},
]
OFFER = """\
Functions that you may call, one JSON object a line:
{"name": "now", "description": "the time", "parameters": {"type": "object"}}
{"name": "f"}
To call a function, write one line of this form and wait for its result:
<tool_call>{"name": "...", "arguments": {...}}</tool_call>
Call a function only where the answer needs its result; else answer directly."""


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def called(content, *calls):
    """Return a message of the assistant: calls by id, name and arguments."""
    made = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
        for key, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(key, content, **fields):
    return {"role": "tool", "tool_call_id": key, "content": content, **fields}


NOW_CALLED = '<tool_call>{"name": "now", "arguments": {"zone":  "UTC"}}</tool_call>'
F_CALLED = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
NOON = '<tool_response>{"name": "now", "content": "\\"noon\\""}</tool_response>'
PARTS = [{"type": "text", "text": "é"}, {"type": "text", "text": "b"}]
HISTORIES = [
    ([system("s"), user("u"), assistant("a")], [system("s"), user("u"), assistant("a")]),
    (
        [
            user("u"),
            called("so:", ("1", "now", '{"zone":  "UTC"}'), ("2", "f", "")),
            result("1", '"noon"'),
            result("2", "done", name="g"),
        ],
        [
            user("u"),
            assistant(f"so:\n\n{NOW_CALLED}\n{F_CALLED}"),
            user(f'{NOON}\n\n<tool_response>{{"name": "g", "content": "done"}}</tool_response>'),
        ],
    ),
    (
        [
            called("", ("1", "f", "{}")),
            result("?", PARTS),
            user([{"type": "text", "text": "u"}]),
            user("v"),
            assistant(PARTS),
        ],
        [
            assistant(F_CALLED),
            user('<tool_response>{"content": "é\\nb"}</tool_response>\n\nu\n\nv'),
            assistant(PARTS),
        ],
    ),
]


@pytest.mark.parametrize(("messages", "wanted"), HISTORIES)
def test_calls_and_results_are_text(messages, wanted):
    before = json.dumps(messages)
    assert as_text(messages) == wanted
    assert json.dumps(messages) == before


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}'])
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(InputError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        as_text([user("u"), called("", ("1", "f", arguments))])


def test_an_offer_is_a_system_text_or_before_the_first_question():
    assert offer([each["function"] for each in TOOLS]) == OFFER
    assert with_system_text([user("u")], "T") == [system("T"), user("u")]
    for role in ("system", "developer"):
        first = {"role": role, "content": "s"}
        told = [{"role": role, "content": "s\n\nT"}, user("u")]
        assert with_system_text([{**first, "content": PARTS}], "T")[0]["content"] == "é\nb\n\nT"
        assert with_system_text([first, user("u")], "T") == told
    told = [assistant("a"), user("T\n\nu"), user("v")]
    assert with_user_text([assistant("a"), user("u"), user("v")], "T") == told
    assert with_user_text([assistant("a")], "T") == [user("T"), assistant("a")]


def rendered(messages):
    """Return what CHAT_TEMPLATE makes of texts."""
    lines = (f"{message['role']}: {message['content']}\n" for message in messages)
    return f"{''.join(lines)}assistant:"


def is_length_of(number, text):
    return number in (len(text), len(text) + 1)  # with a begin token


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}])
def test_tools_are_offered_by_a_template_without_them(client, choice):
    found = num_prompt_tokens(client, [user("u")], tools=TOOLS, max_tokens=600, **choice)
    assert is_length_of(found, rendered([system(OFFER), user("u")]))


def test_without_their_use_nothing_is_offered(client):
    bare = num_prompt_tokens(client, [user("u")])
    assert is_length_of(bare, rendered([user("u")]))
    assert num_prompt_tokens(client, [user("u")], tools=TOOLS, tool_choice="none") == bare


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_call_is_text(client, stream):
    common = {"model": MODEL, "max_tokens": 8, "tools": TOOLS, "seed": 1}
    messages = [user("u")]
    if stream:
        chunks = client.chat.completions.create(stream=True, messages=messages, **common)
        choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(choice.delta.content or "" for choice in choices)
        assert choices[-1].finish_reason in ("stop", "length")
        return
    (choice,) = client.chat.completions.create(messages=messages, **common).choices
    assert choice.message.content and choice.message.tool_calls is None


@pytest.mark.parametrize("offered", [{}, {"tools": TOOLS}])
def test_a_history_with_calls_goes_on(client, offered):
    messages, texts = HISTORIES[1]
    wanted = [system(OFFER), *texts] if offered else texts
    assert is_length_of(num_prompt_tokens(client, messages, **offered), rendered(wanted))


def test_no_message_is_a_clear_400(client):
    with pytest.raises(openai.BadRequestError, match="expected a list such as"):
        num_prompt_tokens(client, [], tools=TOOLS)


def test_a_history_without_ids_goes_on(client):
    messages, texts = HISTORIES[1]
    calls = [{**call, "id": None, "type": None} for call in messages[1]["tool_calls"]]
    messages = [messages[0], {**messages[1], "tool_calls": calls}]
    messages += [{**each, "tool_call_id": None} for each in HISTORIES[1][0][2:]]
    told = user(texts[2]["content"].replace('"name": "now", ', ""))  # no id says whose result it is
    found = num_prompt_tokens(client, messages)
    assert is_length_of(found, rendered([*texts[:2], told]))


def test_a_history_with_calls_is_refused_where_nothing_shows_them(own_client):
    with pytest.raises(openai.BadRequestError, match="does not read tool calls"):
        num_prompt_tokens(own_client, HISTORIES[1][0])


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_refused_auto_names_the_option(own_client, choice):
    with pytest.raises(openai.BadRequestError, match="--tool-template own; use") as caught:
        num_prompt_tokens(own_client, [user("u")], tools=TOOLS, **choice)
    assert "the chat template of this model does not read tools" in str(caught.value)


def started(caplog, serve, **settings):
    """Return what a server says of tools until it listens."""
    caplog.clear()
    with caplog.at_level(logging.INFO), serve(**settings):
        records = [
            each for each in caplog.records if each.name.startswith("dsbd_ort.openai_server")
        ]
        return [each.getMessage() for each in records if "tool" in each.getMessage()]


def test_it_is_said_once_when_the_server_starts(serve, tool_bundle, tiny_bundle, caplog):
    assert started(caplog, serve) == [
        "tools of requests are plain text: the chat template of this model does not read tools; "
        "--tool-template own refuses tool_choice auto instead"
    ]
    assert started(caplog, serve, tool_template="own") == []
    assert started(caplog, serve, bundle=tool_bundle) == []
    assert started(caplog, serve, bundle=tiny_bundle.path) == []  # without a chat template


def test_a_template_without_a_system_message(serve, chat_bundle, tmp_path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    sources = {"chat_template.jinja": refusing + CHAT_TEMPLATE}
    bundle = with_files(chat_bundle, tmp_path / "tiny", sources)
    with serve(bundle=bundle) as server, server.client() as client:
        found = num_prompt_tokens(client, [user("u")], tools=TOOLS)
        assert is_length_of(found, rendered([user(f"{OFFER}\n\nu")]))
        with pytest.raises(openai.BadRequestError, match="no"):
            num_prompt_tokens(client, [system("s"), user("u")], tools=TOOLS)


def test_a_template_of_another_form_is_not_given_the_tools(serve, chat_bundle, tmp_path):
    sources = {"chat_template.jinja": TOOL_TEMPLATE.replace("<tool_call>", "[CALL]")}
    bundle = with_files(chat_bundle, tmp_path / "tiny", sources)
    with serve(bundle=bundle, tool_template="plain") as server, server.client() as client:
        found = num_prompt_tokens(client, [user("u")], tools=TOOLS)
        assert is_length_of(found, rendered([system(OFFER), user("u")]))


def test_the_documentation_shows_what_the_model_reads():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"```text\n{offer([NOW])}\n```" in page
    assert '<tool_response>{"name": "now", "content": "noon"}</tool_response>' in page


def test_an_unknown_setting_is_named():
    with pytest.raises(InputError, match="tool_template is 'json'; expected one of own, plain"):
        ServingSettings(model_name="m", tool_template="json")
