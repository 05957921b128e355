"""Messages of a chat: none leaves no trace in a prompt, and arguments are what a template wants."""

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dsbd_runtime.errors import InputError
from dsbd_runtime.text.chat_messages import check_messages
from dsbd_runtime.text.chat_template import ChatTemplate
from tests.runtime.tiny_tokenizer import tiny_tokenizer

ROLES_BY_NAME = """{%- if messages[0].role == 'system' %}[S]{{ messages[0].content }}[/S]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}[{{ m.role }}]{{ m.content }}
{%- elif m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1].lstrip() }}
{%- for call in m.tool_calls %}<call>{{ call.function | tojson }}</call>{% endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}[user]{% endif %}
{{- '<result>' + m.content + '</result>' }}
{%- endif %}{% endfor %}"""
ALTERNATING = """{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system = messages[0].content %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- for m in loop_messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}
{%- endif %}
{%- if loop.last and system %}{{ system | upper }}{% endif %}
{%- if m.role == 'user' %}U{{ m.content | trim }}{% elif m.role == 'assistant' %}A{{ m.content }}
{%- endif %}{% endfor %}"""
LINES = """{% for m in messages %}{% if not loop.first %}
{% endif %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}{% endif %}
{%- endfor %}"""
FIRST_CALL = """{% for m in messages %}{{ m.role + ':' }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}
{%- endfor %}"""
OPENAI_ROLES = """{% for m in messages %}{% if m.role == "developer" or m.role == "system" %}
{{- '# ' + m.role + ' ' + m.content }}{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}
{%- endfor %}"""
PICKY = """{% for m in messages %}{% if m.content not in ('a', 'b') %}{{ raise_exception('no') }}
{%- endif %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"""
TEMPLATES = [ROLES_BY_NAME, ALTERNATING, LINES, OPENAI_ROLES, PICKY]


def call(name="f", arguments="{}", **more):
    function = {"name": name, "arguments": arguments}
    return {"id": "1", "type": "function", "function": function, **more}


def message(role, content="a", *calls):
    made = {"role": role, "content": content}
    return {**made, "tool_calls": list(calls)} if calls else made


S, U, A, T = (message(role) for role in ("system", "user", "assistant", "tool"))
X, CALLS = message("critic"), message("assistant", "", call("f"), call("g"))
THOUGHT = message("assistant", "<think>a</think>b")
TAKEN = [
    (ROLES_BY_NAME, [S, U, CALLS, T, T, A, U]),
    (ROLES_BY_NAME, [U, S, U]),
    (ROLES_BY_NAME, [message("system", ""), U, THOUGHT, U]),
    (ROLES_BY_NAME, [U, message("assistant", "", call()), message("tool", ""), U]),
    (ROLES_BY_NAME, [U, message("assistant", "<think>a"), U, message("assistant", " "), U]),
    (ALTERNATING, [S, U, A, U]),
    (LINES, [U, U, U]),
    (FIRST_CALL, [U, message("assistant", "dropped with a call", call()), A]),
    (OPENAI_ROLES, [message("developer"), S, U]),
    (PICKY, [U, U]),
]
LOST = [
    (ROLES_BY_NAME, [S, U, X, U], "messages[2], of role 'critic'"),
    (ROLES_BY_NAME, [X, U], "messages[0], of role 'critic'"),
    (ROLES_BY_NAME, [U, message("critic", "")], "messages[1], of role 'critic'"),
    (ROLES_BY_NAME, [U, message("function")], "messages[1], of role 'function'"),
    (ALTERNATING, [U, X, U], "messages[1], of role 'critic'"),  # else no alternating users
    (ALTERNATING, [U, T], "messages[1], of role 'tool'"),
    (LINES, [S, U], "messages[0], of role 'system'"),  # except a new line
    (LINES, [U, X, X, U], "messages[1], of role 'critic'"),
    (LINES, [message("developer"), U], "messages[0], of role 'system'"),
    (FIRST_CALL, [U, CALLS], "messages[1].tool_calls[1], of role 'assistant'"),
    (PICKY, [U, message("critic", "b")], "messages[1], of role 'critic'"),
]


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OF_PARTS = """{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"""
FIRST_PART = """{% if messages[0].role == 'system' %}{% if messages[0].content is string %}
{{- messages[0].content }}{% else %}{{ messages[0].content[0].text }}{% endif %}{% endif %}
{%- for m in messages if m.role == 'user' %}{% for part in m.content %}<{{ part.text }}>{% endfor %}
{%- endfor %}"""
AS_JSON = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
STRIPPED = "{% for m in messages %}{{ m.content.strip() }}{% endfor %}"


def parts(role, *texts, **more):
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts], **more}


JOINED = [  # (template, messages, text)
    (PLAIN, [parts("system", "a b", "c"), parts("user", "d", "e")], "[system]a b\nc[user]d\ne"),
    (PLAIN, [parts("assistant", "a", "b", tool_calls=[]), U], "[assistant]a\nb[user]a"),
    (PLAIN, [{"role": "user", "content": ["a", {"text": "b"}]}], "[user]a\nb"),
    (PLAIN, [parts("user"), U], "[user][user]a"),
    (STRIPPED, [parts("user", " a", "b ")], "a\nb"),
    (AS_JSON, [parts("tool", "a", "b")], '"a\\nb"'),
    (PICKY, [parts("user", "a")], "a"),
    (OF_PARTS, [parts("system", "a", "b"), U, parts("user", "")], "[system]<a><b>[user]a[user]<>"),
    (FIRST_PART, [parts("system", "a", "b"), parts("user", "c", "d")], "a\nb<c><d>"),
    (FIRST_PART, [parts("system", "a"), parts("user", "c", "d")], "a<c><d>"),
]
NAMED = (
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name | upper }}{% endif %}{% endfor %}"
)
NAMES = [  # (template, messages, the place of the name that is refused, or None)
    (PLAIN, [U, {**U, "name": "alice"}], "messages[1].name is 'alice'"),
    (PLAIN, [{**A, "name": "bob"}], "messages[0].name is 'bob'"),
    (PLAIN, [{**U, "name": ""}, {**U, "name": None}], None),
    (NAMED + PLAIN, [{**U, "name": "alice"}, {**S, "name": "eve"}], None),
    (ROLES_BY_NAME, [U, CALLS, {**T, "name": "f"}, {**T, "name": "g"}, U], None),
    (ROLES_BY_NAME, [U, CALLS, {**T, "name": "h"}, U], "messages[2].name is 'h'"),
    (PLAIN + "{{ 1 if messages[0].name == 'alice' }}", [{**U, "name": "alice"}], None),
]


@pytest.mark.parametrize(("source", "messages", "text"), JOINED)
def test_parts_of_a_content_are_joined_by_line_ends_or_read_by_the_template(source, messages, text):
    assert ChatTemplate(source, {}).render(messages) == text


@pytest.mark.parametrize(("source", "messages", "words"), NAMES)
def test_a_name_leaves_a_trace_or_is_refused(source, messages, words):
    template = ChatTemplate(source, {})
    if words is None:
        unnamed = [{k: v for k, v in each.items() if k != "name"} for each in messages]
        has_trace = template.render(messages) != template.render(unnamed)
        assert has_trace == ("name" in source)
        return
    with pytest.raises(InputError) as caught:
        template.render(messages)
    assert str(caught.value).startswith(f"{words}, which leaves no trace in the prompt: ")


@pytest.mark.parametrize(("source", "messages"), TAKEN)
def test_messages_that_a_template_has_a_place_for(source, messages):
    given = [dict(each) for each in messages]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    theirs.chat_template = source
    expected = theirs.apply_chat_template(with_objects(messages), tokenize=False)
    found = ChatTemplate(source, {}).render(messages, add_generation_prompt=False)
    assert found == expected and messages == given


@pytest.mark.parametrize(("source", "messages", "words"), LOST)
def test_a_message_that_leaves_no_trace_is_refused(source, messages, words):
    with pytest.raises(InputError) as caught:
        ChatTemplate(source, {}).render(messages)
    assert str(caught.value).startswith(f"{words}, leaves no trace in the prompt: ")


def with_objects(messages):
    """Return messages as transformers takes them: with arguments that are objects."""
    return [
        {**each, "tool_calls": [call(c["function"]["name"], {}) for c in each["tool_calls"]]}
        if "tool_calls" in each
        else each
        for each in messages
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(TEMPLATES),
    st.lists(
        st.builds(
            message,
            st.sampled_from(["system", "user", "assistant", "tool", "critic"]),
            st.sampled_from(["", "a", "<think>a</think>b", "a b"]),
        )
        | st.sampled_from([CALLS]),
        min_size=1,
        max_size=5,
    ),
)
def test_what_is_rendered_lacks_nothing(source, messages):
    """Against another way to see it: any other content, or none, makes another prompt."""
    template = ChatTemplate(source, {})
    try:
        text = template.render(messages)
    except InputError as error:
        assert "leaves no trace" in str(error) or "refuses" in str(error) or "calls" in str(error)
        return
    plain = jinja2_render(source)
    for index, each in enumerate(messages):
        others = [[{**each, "content": "another"}], []]
        if each is CALLS:
            others = [[{**each, "tool_calls": [call("h")]}], []]
        prompts = [plain([*messages[:index], *other, *messages[index + 1 :]]) for other in others]
        assert any(prompt != text for prompt in prompts)


def jinja2_render(source):
    """Return a renderer without any of our checks; None where the template refuses messages."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    theirs.chat_template = source

    def render(messages):
        try:
            return str(theirs.apply_chat_template(with_objects(messages), tokenize=False))
        except (jinja2.TemplateError, TypeError, ValueError):
            return None

    return render


def test_a_long_conversation_is_rendered_twice():
    rendered = []
    template = ChatTemplate(ROLES_BY_NAME + "{{ count() }}", {})
    conversation = [S, *[U, CALLS, T, T, A] * 200]
    template.render(conversation, variables={"count": lambda: rendered.append(1) or ""})
    assert len(rendered) == 2


def test_the_developer_is_the_system_where_the_template_knows_no_developer():
    for source in (ROLES_BY_NAME, ALTERNATING, "{% for m in messages %}{{ m }}{% endfor %}"):
        template = ChatTemplate(source, {})
        assert template.render([message("developer"), U]) == template.render([S, U])
    known = ChatTemplate(OPENAI_ROLES, {})
    assert known.render([message("developer"), U]) == "# developer a[user]a"


WRITE = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"
FUNCTION = "{{ c.function.name }}"
WANTED = [  # a template's way with arguments, what it makes of them
    ("{{ c.function.arguments | tojson }}", '{"b": "ö", "a": [1.0, {}]}'),
    ("{{ c.function | tojson }}", '{"name": "f", "arguments": {"b": "ö", "a": [1.0, {}]}}'),
    ("{% set c = c.function %}{{ c.arguments|items|list }}", "[('b', 'ö'), ('a', [1.0, {}])]"),
    (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        "b=ö;a=[1.0, {}];",
    ),
    ("{{ c.function.arguments.b }}{{ c.function.arguments['a'][0] }}", "ö1.0"),
    ("{{ c.function.arguments is mapping }}", "True"),
    (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
        '{"b": "ö", "a": [1.0, {}]}',
    ),
    ("{{ c.function.arguments }}", '{"b":"\\u00f6", "a":[1.0,{}]}'),
    ("{{ '```' + c.function.arguments + '```' }}", '```{"b":"\\u00f6", "a":[1.0,{}]}```'),
    ("{{ c.function.arguments ~ '' }}", '{"b":"\\u00f6", "a":[1.0,{}]}'),
    ("{{ c.function.arguments | string | trim }}", '{"b":"\\u00f6", "a":[1.0,{}]}'),
    ("{{ '%s' | format(c.function.arguments) }}", '{"b":"\\u00f6", "a":[1.0,{}]}'),
]


@pytest.mark.parametrize(("written", "expected"), WANTED)
def test_arguments_are_what_the_template_wants(written, expected):
    template = ChatTemplate(f"{WRITE}{FUNCTION}:{written}{END}", {})
    text = '{"b":"\\u00f6", "a":[1.0,{}]}'
    found = template.render([message("assistant", "", call("f", text))])
    assert found == f"f:{expected}"
    as_object = template.render([message("assistant", "", call("f", {"b": "ö", "a": [1.0, {}]}))])
    assert as_object == f"f:{expected}".replace(text, '{"b": "ö", "a": [1.0, {}]}')


@pytest.mark.parametrize("as_json", ["", "|tojson"])
@pytest.mark.parametrize("arguments", ["", " ", "{}", {}])
def test_no_arguments_are_an_empty_object(as_json, arguments):
    written = f"{FUNCTION}{{{{ c.function.arguments{as_json} }}}}"
    template = ChatTemplate(WRITE + written + END, {})
    assert template.render([message("assistant", "", call("f", arguments))]) == "f{}"


def test_calls_without_a_function_object():
    template = ChatTemplate(WRITE + "{{ c.name }}{{ c.arguments | tojson }}" + END, {})
    bare = {"name": "f", "arguments": '{"a":1}'}
    assert template.render([message("assistant", None, bare)]) == 'f{"a": 1}'  # a null is no field


NO_ARGUMENTS = ["{", "[1]", "5", "null", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}']
NO_ARGUMENTS += ["[" * 9**6, None, 5]
NO_CALLS = [
    *((message("assistant", "", call("f", a)), ".arguments is ") for a in NO_ARGUMENTS),
    (message("assistant", "", call("f", {"a": float("nan")})), ".arguments is "),
    (message("assistant", "", call("f", {"a": {1, 2}})), ".arguments is "),
    (message("assistant", "", 5), " is 5"),
    ({"role": "assistant", "tool_calls": "f"}, " is 'f'"),
]


@pytest.mark.parametrize(("assistant", "words"), NO_CALLS)
def test_calls_that_are_none_are_said(assistant, words):
    template = ChatTemplate(WRITE + FUNCTION + END, {})
    with pytest.raises(InputError) as caught:
        template.render([U, assistant])
    assert str(caught.value).startswith("messages[1].tool_calls")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"messages\[1\].tool_calls is given, but"):
        ChatTemplate(LINES, {}).render([U, CALLS])  # a template that reads no calls


MEDIA = ("image_url", "image", "input_audio", "video")
NO_TEXTS = [({"type": kind}, "is a part of type .* cannot be read") for kind in MEDIA]
NO_TEXTS += [(part, "is .*; expected a text") for part in ({"type": "text"}, {"text": 5}, 5, None)]


@pytest.mark.parametrize(("part", "words"), NO_TEXTS)
def test_a_part_without_a_text_is_refused(part, words):
    with pytest.raises(InputError, match=rf"^messages\[0\].content\[1\] {words}"):
        check_messages([{"role": "user", "content": ["a", part]}])
