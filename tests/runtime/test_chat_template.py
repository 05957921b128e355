"""Chat templates: the text that transformers makes of the same messages; sandbox and refusals."""

import json
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.text.chat_template import ChatTemplate
from tests.runtime.tiny_tokenizer import BOS, EOS, tiny_tokenizer

LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system_message }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
CHATML_LIKE = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message.role }}
    {% if message.role == 'assistant' %}
{% generation %}{% set said = message.content.split('</think>')[-1] %}{{ said.lstrip('\\n') }}
{%- endgeneration %}{{ said is defined }}
    {% else %}
{{ message.content }}
    {% endif %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL_LIKE = """{%- set ns = namespace(turn=0, last=-1) -%}
{%- for message in messages %}{% if message["role"] == "user" %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor -%}
{{ bos_token }}
{%- for message in messages if message['role'] != 'system' -%}
    {%- if (message['role'] == 'user') != (ns.turn % 2 == 0) -%}
        {{- raise_exception('roles must alternate user/assistant') -}}
    {%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
    {%- if message.role == 'user' -%}
        {%- if tools and loop.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif -%}
        [INST] {{ message.content }} [/INST]
    {%- else -%}
        {{- ' ' + message.content + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
LOOPS_LIKE = """{% for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif -%}
{%- if loop.index > 3 %}{% break %}{% endif -%}
{{ message | tojson }}{{ dict(role=message.role).items() | list }}
{%- for key, value in message.items() | sort %}{{ key }}={{ value | upper }};{% endfor %}
{% endfor %}"""
TEMPLATES = {
    "llama": LLAMA_LIKE,
    "chatml": CHATML_LIKE,
    "mistral": MISTRAL_LIKE,
    "loops": LOOPS_LIKE,
}
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
HI = {"role": "user", "content": "hi"}
LEAVE_OUT_THE_SYSTEM = ("mistral", "loops")
USER = {"role": "user", "content": '  What is <b>"it\'s"</b> & é? '}
ASSISTANT = {"role": "assistant", "content": "<think>hm</think>\nNothing."}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER]]
CONVERSATIONS += [[SYSTEM, USER, ASSISTANT, USER, ASSISTANT]]
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b"}}
VARIABLES = [{}, {"tools": [TOOL]}, {"enable_thinking": False, "date_string": "2020"}]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=len)
@pytest.mark.parametrize("variables", VARIABLES, ids=lambda v: "+".join(v) or "plain")
@pytest.mark.parametrize("adds_prompt", [True, False])
def test_the_text_is_that_of_transformers(name, messages, variables, adds_prompt):
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token=BOS, eos_token=EOS
    )
    theirs.chat_template = TEMPLATES[name]
    options = {"add_generation_prompt": adds_prompt, **variables}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": BOS, "eos_token": EOS})
    if messages[0] is SYSTEM and name in LEAVE_OUT_THE_SYSTEM:
        with pytest.raises(InputError, match=r"messages\[0\], of role 'system', leaves no trace"):
            ours.render(messages, add_generation_prompt=adds_prompt, variables=variables)
        return
    found = ours.render(messages, add_generation_prompt=adds_prompt, variables=variables)
    assert found == expected
    assert messages[-1]["content"].strip()[-4:] in found or name == "loops"


CALLED = {"role": "assistant", "content": None, "name": None}
OTHER_TEMPLATES = [  # (template, messages)
    ("{% for m in messages %}{{ m.content }}{{ m.name is defined }};{% endfor %}", [USER, CALLED]),
    ("{{ dict.fromkeys(['a', 'b'], 1) }}{{ dict.fromkeys('c') }}{{ dict(a=1) }}" + ALL, [USER]),
]


@pytest.mark.parametrize(("source", "messages"), OTHER_TEMPLATES)
def test_nulls_and_dicts_are_as_in_transformers(source, messages):
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source, {}).render(messages, add_generation_prompt=False) == expected


def test_the_clock_is_an_argument():
    source = '{{ strftime_now("%d %b %Y") }}' + ALL
    template = ChatTemplate(source, {}, now=lambda: datetime(2024, 7, 26))
    assert template.render([HI]) == "26 Jul 2024hi"


def folder_with(folder, *, config=None, template=None):
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


NAMED = [
    {"name": "rag", "template": "{{"},
    {"name": "default", "template": "d{{ eos_token }}" + ALL},
    {"name": "tool_use", "template": "t{{ tools | length }}" + ALL},
]
BOS_FIRST = "{{ bos_token }}" + ALL
PLACES = [  # (tokenizer_config.json, files, text without tools, with two tools)
    ({"chat_template": BOS_FIRST, "bos_token": "<s>"}, {}, "<s>hi", "<s>hi"),
    (
        {"chat_template": "c", "bos_token": {"__type": "AddedToken", "content": "<s>"}},
        {"chat_template": "é" + BOS_FIRST},
        "é<s>hi",
        "é<s>hi",
    ),
    ({"chat_template": NAMED, "eos_token": "</s>"}, {}, "d</s>hi", "t2hi"),
    ({"chat_template": NAMED}, {"chat_template": "f" + ALL}, "fhi", "fhi"),
    ({"bos_token": None}, {"chat_template": "f" + BOS_FIRST}, "fhi", "fhi"),
    (None, {"chat_template": "f" + ALL, "tool_use": "g" + ALL, "rag": "{{"}, "fhi", "ghi"),
    (
        {"extra_special_tokens": {"image": "<image>"}},
        {"chat_template": "{{ image }}" + ALL},
        "<image>hi",
        "<image>hi",
    ),
    ({"extra_special_tokens": ["<image>"]}, {"chat_template": "f{{ image }}" + ALL}, "fhi", "fhi"),
]


@pytest.mark.parametrize(("config", "files", "plain", "with_tools"), PLACES)
def test_the_template_is_the_one_that_transformers_uses(tmp_path, config, files, plain, with_tools):
    folder = folder_with(tmp_path, config=config, template=files.get("chat_template"))
    for name, source in files.items():
        if name != "chat_template":
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    ours = ChatTemplate.from_folder(folder)
    assert ours.render([HI], variables={"tools": None}) == ours.render([HI]) == plain
    assert ours.render([HI], variables={"tools": [TOOL, TOOL]}) == with_tools
    assert ours.source(has_tools=True) in (
        *files.values(),
        *[each["template"] for each in NAMED],
        (config or {}).get("chat_template"),
    )
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for tools, text in ((None, plain), ([TOOL, TOOL], with_tools)):
        assert theirs.apply_chat_template([HI], tools=tools, tokenize=False) == text


def test_a_template_for_tools_alone(tmp_path):
    ours = ChatTemplate.from_folder(folder_with(tmp_path, config={"chat_template": NAMED[2:]}))
    assert ours.render([HI], variables={"tools": []}) == "t0hi"
    with pytest.raises(BundleError, match="with tools only"):
        ours.render([HI])


NO_TEMPLATES = [  # (tokenizer_config.json, bytes of chat_template.jinja, what is said)
    *(
        (config, None, r"has no chat template: neither chat_template\.jinja")
        for config in (None, {}, {"chat_template": None}, {"chat_template": [{"name": "rag"}]}, [1])
    ),
    *(
        (None, source, "is not a jinja2 template")
        for source in (b"{% if %}", b"{{ x", b"{% nonsense %}", b"{{" + b"(" * 5000)
    ),
    (None, b"\xff\xfe", "cannot be read as UTF-8"),
]


@pytest.mark.parametrize(("config", "content", "words"), NO_TEMPLATES, ids=lambda v: str(v)[:30])
def test_no_template_is_said(tmp_path, config, content, words):
    folder = folder_with(tmp_path, config=config)
    if content is not None:
        (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(BundleError, match=words):
        ChatTemplate.from_folder(folder)


REFUSED = [
    (MISTRAL_LIKE, [ASSISTANT], "roles must alternate user/assistant"),
    (LLAMA_LIKE, [{"role": "user", "content": 7}], "refuses these messages"),
    ("{{ messages[0].nothing.at_all }}", [USER], "refuses these messages"),
    ("{{ 1 / 0 }}", [USER], "division by zero"),
    ("{{ range(1000000000) | list }}", [USER], "Range too big"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", [USER], "refuses these messages"),
    # the way out of the sandbox, in some of its spellings
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [USER], "unsafe"),
    ("{{ cycler.__init__.__globals__.os.system('id') }}", [USER], "unsafe"),
    ("{{ raise_exception.__globals__ }}x{{ dict.mro() }}", [USER], "refuses these messages"),
    ("{% set ns = namespace() %}{% set ns.__x = 1 %}", [USER], "may not hold '__x'"),
    ("{{ namespace(__x=1) }}", [USER], "may not hold '__x'"),
    ("{{ messages.append(1) }}", [USER], "unsafe"),
    ("{{ messages[0].update(role='x') }}", [USER], "unsafe"),
    ("{% include '/etc/passwd' %}", [USER], "refuses these messages"),
    ("x", [], "messages is"),
    ("x", "hello", "messages is 'hello'"),
    ("x", [{"content": "a"}], r"messages\[0\] is"),
    ("x", [USER, "a"], r"messages\[1\] is 'a'"),
]


@pytest.mark.parametrize(("source", "messages", "words"), REFUSED)
def test_refusals_are_one_line(source, messages, words):
    with pytest.raises(InputError, match=words) as caught:
        ChatTemplate(source, {}).render(messages)
    assert "\n" not in str(caught.value)


def test_formatting_shows_nothing_of_the_inside():
    template = ChatTemplate("{{ '{0.__class__}'.format(messages) }}" + ALL, {})
    assert "class" not in template.render([USER])
