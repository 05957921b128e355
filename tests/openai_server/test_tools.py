"""Tools through OpenAI's client: required and named calls, streams, what text becomes calls."""

import json

import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_ort.openai_server.tools import ToolUse, auto_fault
from tests.openai_server.conftest import CHAT_TEMPLATE, TOOL_TEMPLATE, num_prompt_tokens
from tests.openai_server.running_server import MODEL
from tests.runtime.bundle_edits import with_files

MESSAGES = [{"role": "user", "content": "go"}]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ['Rom"e', "Bonn]}", "Oslo\\"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
SCHEMA_BY_NAME = {"weather": PLACE, "now": {"type": "object", "maxProperties": 0}}


def check_call(call):
    assert call.type == "function" and call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA_BY_NAME[call.function.name])


def chosen(client, **fields):
    """Return the only choice of a chat."""
    given = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **fields}
    (choice,) = client.chat.completions.create(**given).choices
    return choice


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_named_function(own_client, pipeline, num_beams):
    for seed in range(4):
        options = {"strategy": "dsbd", "num_beams": num_beams, "seed": seed}
        named = {"type": "function", "function": {"name": "weather"}}
        choice = chosen(own_client, tool_choice=named, extra_body=options)
        assert choice.finish_reason == "stop" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        check_call(call)
        options |= {"constraint": {"json_schema": PLACE}, "max_new_tokens": 200}
        wanted = pipeline.generate(pipeline.chat_prompt(MESSAGES), **options)
        assert call.function.arguments == wanted.sequences[0].text


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(tool_client, num_beams, parallel):
    for seed in range(6):
        choice = chosen(
            tool_client,
            tool_choice="required",
            parallel_tool_calls=parallel,
            max_tokens=1200,
            extra_body={"num_beams": num_beams, "strategy": "dsbd", "seed": seed},
        )
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert 1 <= len(calls) <= (16 if parallel else 1)
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            check_call(call)


NODE = {
    "type": "object",
    "properties": {
        "v": {"enum": [1]},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
UNTYPED = [
    {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
    {"$defs": {"Node": NODE}, "allOf": [{"$ref": "#/$defs/Node"}]},
    {"$defs": {"Node": NODE}, "anyOf": [{"$ref": "#/$defs/Node"}, {"type": "string"}]},
    {**{name: NODE[name] for name in NODE if name != "type"}, "$defs": {"Node": NODE}},
    {**NODE, "type": ["object", "null"], "$defs": {"Node": NODE}},
]


@pytest.mark.parametrize("schema", UNTYPED, ids=lambda schema: str([*schema]))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_without_a_type_of_their_own_are_objects(own_client, schema, choice):
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400, "seed": 1}
    answer = chosen(own_client, tools=[tool("f", schema)], **fields)
    arguments = json.loads(answer.message.tool_calls[0].function.arguments)
    assert isinstance(arguments, dict) and arguments["v"] == 1
    jsonschema.validate(arguments, schema)


def test_required_calls_of_schemas_with_ids_anchors_and_references_as_data(own_client):
    values = [{"$ref": "#/nowhere", "$id": "no uri %"}, "b", "c"]
    tools = [
        tool(
            f"f{index}",
            {
                "$id": "https://example.com/schema.json",
                "type": "object",
                "properties": {"a": {"$ref": place}},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"a": {"$anchor": "a", "const": value}},
            },
        )
        for index, (value, place) in enumerate(zip(values, ("#/$defs/a", "#a", "#a"), strict=True))
    ]
    names = set()
    for seed in range(20):
        choice = chosen(own_client, tools=tools, tool_choice="required", seed=seed)
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            value = values[int(call.function.name[1:])]
            assert json.loads(call.function.arguments) == {"a": value}
            names.add(call.function.name)
    assert len(names) == 3


def test_tools_are_told_to_the_template_unless_none(tool_client):
    fields = {"messages": MESSAGES, "max_tokens": 300}
    bare = num_prompt_tokens(tool_client, **fields)
    assert num_prompt_tokens(tool_client, tools=TOOLS, tool_choice="none", **fields) == bare
    for choice in ("auto", "required"):
        told = num_prompt_tokens(tool_client, tools=TOOLS, tool_choice=choice, **fields)
        assert told == bare + len(json.dumps(TOOLS))
    hinted = [{**TOOLS[1], **hint} for hint in ({}, {"cache_control": {"type": "ephemeral"}})]
    assert len({num_prompt_tokens(tool_client, tools=[each], **fields) for each in hinted}) == 1


def test_a_conversation_goes_on_after_a_call(tool_client):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "now", "arguments": '{"zone": "UTC"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    with_call = 'assistant: <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>\n'
    text = f"user: go\n{with_call}tool: noon\nassistant:"
    assert num_prompt_tokens(tool_client, messages) in (len(text), len(text) + 1)


SYSTEM_AND_USER_ONLY = (
    "{% for m in messages if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}"
)


def test_no_message_vanishes(serve, chat_bundle, tmp_path):
    sources = {"chat_template.jinja": SYSTEM_AND_USER_ONLY}
    bundle = with_files(chat_bundle, tmp_path / "tiny", sources)
    with serve(bundle=bundle) as server, server.client() as client:
        first = {"role": "system", "content": "brief"}
        alone, with_system, with_developer = (
            num_prompt_tokens(client, messages)
            for messages in (
                MESSAGES,
                [first, *MESSAGES],
                [{**first, "role": "developer"}, *MESSAGES],
            )
        )
        assert with_developer == with_system > alone
        for role in ("critic", "Tool"):
            with pytest.raises(openai.BadRequestError, match="leaves no trace") as caught:
                num_prompt_tokens(client, [*MESSAGES, {**first, "role": role}])
            error = caught.value.body
            assert error["param"] == "messages.1" and repr(role) in error["message"]


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_template_named_tool_use_is_that_of_conversations_with_tools(
    serve, chat_bundle, tmp_path
):
    source_by_file = {"additional_chat_templates/tool_use.jinja": "with tools " + TOOL_TEMPLATE}
    bundle = with_files(chat_bundle, tmp_path / "tiny", source_by_file)
    fields = {"messages": MESSAGES, "max_tokens": 200}
    with serve(bundle=bundle) as server, server.client() as client:
        bare = num_prompt_tokens(client, **fields)
        assert num_prompt_tokens(client, tools=TOOLS, tool_choice="none", **fields) == bare
        for choice in ("auto", "required"):  # auto is refused by the default template
            told = num_prompt_tokens(client, tools=TOOLS[1:], tool_choice=choice, **fields)
            assert told == bare + len(f"with tools {json.dumps(TOOLS[1:])}")


REFUSED = [
    ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "names 'f'; expected one of weather, now",
    ),
    ({"tools": [TOOLS[1], TOOLS[1]], "tool_choice": "required"}, "tools", "have the same name"),
    (
        {"tools": [tool("f", {"type": "string"})], "tool_choice": "required"},
        "tools",
        "expected a schema of type 'object'",
    ),
    (
        {"tools": [tool("f", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}})],
         "tool_choice": "required"},
        "tools",
        "Unsatisfiable schema",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "contradict each other",
    ),
    (
        {
            "tools": [tool("f", {"type": "object", "unevaluatedProperties": False})],
            "tool_choice": "required",
        },
        "tools",
        "unevaluatedProperties",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_a_fault_is_one_clear_400(client, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        chosen(client, **{"tools": openai.NOT_GIVEN, **fields})
    error = caught.value.body
    assert error["param"] == param and words in error["message"], error


def test_auto_needs_a_template_whose_calls_are_text():
    assert auto_fault(TOOL_TEMPLATE, tag_is_text=True) is None
    for template, is_text, words in (
        (None, True, "does not read tools"),
        (CHAT_TEMPLATE, True, "does not read tools"),
        ("{{ tools }}[TOOL_CALLS]", True, "does not write calls as"),
        (
            "{{ tools }}<tool_call><function=f></tool_call>arguments",
            True,
            "does not write calls as",
        ),
        (TOOL_TEMPLATE, False, "drops <tool_call> from texts"),
    ):
        assert words in (auto_fault(template, is_text) or "")


def read(reader, pieces):
    """Return the content, and name and arguments of each call."""
    content = ""
    calls = {}
    additions = [reader.push(piece) for piece in pieces]
    for addition in [*additions, reader.finish()]:
        content += addition.content
        for index, name, arguments in addition.calls:
            assert (name is None) == (index in calls)
            before, so_far = calls.get(index, (name or "", ""))
            calls[index] = (before, so_far + arguments)
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values())


CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "</b>"}}\n</tool_call>'
FOUND = ("now", '{"a": "</b>"}')
TAGGED = '<tool_call>{"name": "now", "arguments": %s}</tool_call>'
TAGS_IN_STRINGS = [
    '{"a": "</tool_call>"}',
    '{"a": "<tool_call>\\"</tool_call>}", "b": ["</tool_call></tool_call>"]}',
    '{"</tool_call>": 1}',
]
NO_JSON = ['{"a": NaN}', '{"a": [-Infinity]}', '{"a": Infinity}', '{"a": 1e999}', '{"a": 01}']
BAD = '<tool_call>{"a": NaN, "b</tool_call>'
AUTO = [
    ("plain < text", "plain < text", []),
    (CALL, "", [("now", '{"a": "</b>"}')]),
    (f"so:\n{CALL}\n{CALL}", "so:\n\n", [("now", '{"a": "</b>"}')] * 2),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>',) * 2 + ([],),
    ('<tool_call>{"name": ["now"], "arguments": {}}</tool_call>',) * 2 + ([],),
    ("<tool_call>{", "<tool_call>{", []),
    ("a <tool_cal", "a <tool_cal", []),
    *((f"{TAGGED % a}{tail}", tail, [("now", a)]) for a in TAGS_IN_STRINGS for tail in ("", " b")),
    (TAGGED % '{"a": "\\ud800"}', "", [("now", '{"a": "\\ud800"}')]),
    *((TAGGED % a,) * 2 + ([],) for a in NO_JSON),
    (
        f'<tool_call>{{"a": "b"c"}}</tool_call>{CALL}',
        '<tool_call>{"a": "b"c"}</tool_call>',
        [FOUND],
    ),
    (f'<tool_call>{{"a": "b</tool_call>{CALL}', '<tool_call>{"a": "b</tool_call>', [FOUND]),
    (f"{BAD}{CALL}", BAD, [FOUND]),
]
LISTED = '[{"name":"now","arguments":{}},{"name":"weather","arguments":{"city":"a\\"}]","n":[{}]}}]'


@pytest.mark.parametrize(("text", "content", "calls"), AUTO, ids=range(len(AUTO)))
def test_what_text_becomes_a_call(text, content, calls):
    use = ToolUse("auto", ("now",), None)
    assert read(use.reader(), [text]) == (content, calls)
    assert read(use.reader(), list(text)) == (content, calls)


@given(st.data())
def test_calls_are_the_same_however_the_text_is_cut(data):
    cases = [
        *((ToolUse("auto", ("now",), None), *case) for case in AUTO),
        (
            ToolUse("required", ("now", "weather"), {}),
            LISTED,
            "",
            [("now", "{}"), ("weather", '{"city":"a\\"}]","n":[{}]}')],
        ),
        (ToolUse("named", ("now",), {}), '{"a":1}', "", [("now", '{"a":1}')]),
    ]
    use, text, content, calls = data.draw(st.sampled_from(cases))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(use.reader(), pieces) == (content, calls)
