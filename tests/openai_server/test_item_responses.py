"""/v1/responses through OpenAI's client: items, events in their order, what is refused by name."""

import json
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from dsbd_ort import StreamPiece
from dsbd_runtime.errors import EngineError
from tests.openai_server.conftest import num_prompt_tokens
from tests.openai_server.fakes import ScriptedService
from tests.openai_server.running_server import MODEL, running_server
from tests.openai_server.test_tools import PLACE, SCHEMA_BY_NAME

FIELDS = {"model": MODEL, "input": "go", "max_output_tokens": 12}
SEED = {"extra_body": {"seed": 3}}
TOOLS = [
    {"type": "function", "name": "weather", "parameters": PLACE, "strict": True},
    {"type": "function", "name": "now", "description": "the time", "parameters": None},
]
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def events_of(server, **fields):
    """Return the events of a stream, each checked against OpenAI's own types."""
    answer = server.http.post("/v1/responses", json={**FIELDS, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    events = []
    for number, text in enumerate(answer.text.strip().split("\n\n")):
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


def without_ids(response):
    items = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}  # the same prompt came before
    changed = {"id": "", "created_at": 0, "output": items, "usage": usage, "dsbd": None}
    return {**response, **changed}


def test_cached_tokens_are_counted(serve):
    with serve() as server:
        found = [server.http.post("/v1/responses", json=FIELDS).json()["usage"] for _ in range(2)]
        again = events_of(server)[-1]["response"]["usage"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "n": 2}
        asked = server.http.post("/v1/chat/completions", json=chat).json()["usage"]
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in (*found, again)]
    assert cached[0] == 0 and cached[1] == cached[2] > 0
    assert asked["prompt_tokens_details"]["cached_tokens"] == cached[1] < asked["prompt_tokens"]


def test_a_text_is_that_of_the_pipeline(client, server, pipeline):
    response = client.responses.create(**FIELDS, **SEED, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
    wanted = pipeline.generate(pipeline.chat_prompt(messages), max_new_tokens=12, seed=3)
    assert response.output_text == wanted.sequences[0].text
    assert (response.status, response.object) == ("incomplete", "response")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == wanted.stats.num_prompt_tokens
    assert (response.usage.output_tokens, response.instructions) == (12, "Be brief.")
    assert response.model_extra["dsbd"]["seed"] == 3
    raw = server.http.post("/v1/responses", json=FIELDS).json()
    assert Response.model_validate(raw).output[0].role == "assistant"


def test_a_stream_has_the_events_of_a_message_in_their_order(server):
    whole = server.http.post("/v1/responses", json={**FIELDS, "seed": 3}).json()
    events = events_of(server, seed=3)
    begun, added, part, first = events[:2], *events[2:5]
    *deltas, said, part_done, done, last = events[5:]
    assert [event["type"] for event in begun] == ["response.created", "response.in_progress"]
    assert begun[0]["response"]["status"] == "in_progress" and not begun[0]["response"]["output"]
    assert added["item"]["content"] == [] and part["part"]["text"] == ""
    text = "".join(event["delta"] for event in (first, *deltas))
    assert {event["type"] for event in (first, *deltas)} == {"response.output_text.delta"}
    assert (
        text
        == said["text"]
        == part_done["part"]["text"]
        == whole["output"][0]["content"][0]["text"]
    )
    names = [event["type"].removeprefix("response.") for event in (said, part_done, done, last)]
    assert names == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert without_ids(last["response"]) == without_ids(whole)
    assert last["response"]["output"] == [done["item"]]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls_are_items_and_events(server, client, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": 1200, "seed": 1}
    whole = server.http.post("/v1/responses", json={**FIELDS, **fields}).json()
    events = events_of(server, **fields)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[-1]["type"] == "response.completed"
    items = whole["output"]
    assert {item["type"] for item in items} == {"function_call"}
    for index, item in enumerate(items):
        pydantic.TypeAdapter(dict).validate_json(item["arguments"])
        mine = [event for event in events if event.get("output_index") == index]
        kinds = [event["type"].removeprefix("response.") for event in mine]
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
        assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
        assert kinds[-2] == "function_call_arguments.done"
        assert "".join(event["delta"] for event in mine[1:-2]) == item["arguments"]
        assert item["name"] in SCHEMA_BY_NAME and item["call_id"].startswith("call_")


class City(pydantic.BaseModel):
    """A schema that the client makes of a class."""

    name: Literal["Rome", "Bonn"]
    days: int = pydantic.Field(ge=0, le=9)


def test_the_stream_helper_gathers_the_same(client):
    fields = {**FIELDS, **SEED, "max_output_tokens": 200, "text_format": City}
    with client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    whole, final = client.responses.parse(**fields), stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert isinstance(final.output_parsed, City)


def test_a_parsed_answer_follows_its_schema(client):
    fields = {**FIELDS, "max_output_tokens": 200}
    response = client.responses.parse(**fields, text_format=City)
    assert isinstance(response.output_parsed, City) and response.status == "completed"
    text = {"format": {"type": "json_object"}}
    response = client.responses.create(**fields, text=text, extra_body={"seed": 1})
    assert response.output_text.startswith("{")


def test_a_conversation_is_the_prompt_of_the_same_chat(tool_client):
    """Items that the endpoint returned are sent back as they are, with results of its calls."""
    chosen = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    first = tool_client.responses.create(**{**FIELDS, "max_output_tokens": 600}, **chosen)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    parts = [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "now?"}]
    conversation = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        call.model_dump(),
        {**result, "output": [{"type": "input_text", "text": text} for text in ("warm", "dry")]},
        {"type": "message", "role": "user", "content": parts},
    ]
    second = tool_client.responses.create(**{**FIELDS, "input": conversation}, tools=TOOLS)
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "warm\ndry"},
        {"role": "user", "content": "And\nnow?"},
    ]
    functions = [{k: v for k, v in tool.items() if k != "type" and v} for tool in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    assert second.usage.input_tokens == num_prompt_tokens(tool_client, messages, tools=tools)
    third = [*conversation, *[item.model_dump() for item in second.output]]
    tool_client.responses.create(**{**FIELDS, "input": third}, tools=TOOLS)


NO_SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "no such type"}}
IMAGE = {"type": "input_image", "image_url": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "c"}, "conversation", "send the whole conversation as input"),
        ({"store": True}, "store", "nothing is stored"),
        ({"background": True}, "background", "while its client waits"),
        ({"truncation": "auto"}, "truncation", "never cut silently"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "'none'"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "only one level"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input.0", "leave the item out"),
        ({"client_metadata": "a"}, "client_metadata", "must be an object"),
        ({"stop": ""}, "stop", "stop has an empty text"),
        ({"include": ["file_search_call.results"]}, "include", "no such parts"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "type 'web_search' is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input.0", "'item_reference'"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0", "input_image"),
        ({"input": []}, "input", ""),
        ({"input": "go " * 900}, "input", "this model's maximum context length is"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input.0.role", "'user'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format.schema is"),
        ({"text": {"format": NO_SCHEMA}}, "text.format", "text.format: "),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "'medium'"),
        ({"n": 2}, "n", "one answer"),
        ({"max_tokens": 2}, "max_tokens", "use `max_output_tokens`"),
        ({"messages": []}, "messages", "use `input`"),
        ({"num_return_sequences": 2}, "num_return_sequences", "one answer"),
        ({"no_such_field": 1}, "no_such_field", "unknown field"),
        ({"seed": "x"}, "seed", "integer"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; expected"),
        ({"max_new_tokens": 3}, "max_output_tokens", "max_output_tokens contradicts another"),
        ({"temperature": -1}, "temperature", "expected"),
        ({"model": "other"}, "model", "unknown model"),
    ],
)
def test_what_is_refused_is_named_in_one_line(server, fields, param, said):
    answer = server.http.post("/v1/responses", json={**FIELDS, **fields})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and said in error["message"], error
    assert "\n" not in error["message"] and error["param"] == param, error


def test_neutral_values_and_nulls_are_accepted(server):
    neutral = {
        "store": False,
        "background": None,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "none", "summary": "auto"},
        "client_metadata": {"a": "b"},
        "truncation": "disabled",
        "previous_response_id": None,
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
        "strategy": "dsbd",
        "num_beams": 2,
    }
    answer = server.http.post("/v1/responses", json={**FIELDS, **neutral})
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"] == {"a": "b"}
    assert answer.json()["dsbd"]["strategy"] == "dsbd"


def test_an_engine_that_fails_ends_the_stream_with_a_failed_response(pipeline):
    step = StreamPiece([65, 66], "AB", [-1.0, -2.0])
    script = lambda: iter([step, EngineError("/srv/models/x.onnx broke")])  # noqa: E731
    with running_server(ScriptedService(pipeline, script)) as server:
        last = events_of(server)[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["message"].startswith("the engine failed")
        assert last["response"]["output"][0]["content"][0]["text"] == "AB"
        with server.client() as client, pytest.raises(openai.InternalServerError):
            client.responses.create(**FIELDS)
