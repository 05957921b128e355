"""Chats of the native library: transformers' texts, and the runtime's refusals."""

import json
import os
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from dsbd_export.gate.text_checks import write_text_checks
from dsbd_runtime.text.chat_template import ChatTemplate
from tests.native.conftest import ROOT, cached
from tests.native.text_command import ask, command_in, written
from tests.runtime.test_chat_messages import (
    JOINED,
    LOST,
    NAMES,
    TAKEN,
    WANTED,
    WRITE,
    call,
    message,
)
from tests.runtime.test_chat_template import CONVERSATIONS, TEMPLATES
from tests.runtime.tiny_tokenizer import tiny_tokenizer
from tests.tokenizer_corpus import CHATS, CORPUS, TOOL

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WITH_TEMPLATE = [name for name, kind in CORPUS.items() if "chat_template" in kind.config]


@pytest.fixture(scope="session")
def render(native_build, tmp_path_factory):
    """Renders requests with a template's source."""
    folder = written("tiny_tokenizer", tmp_path_factory.mktemp("chat"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))

    def rendered(source, requests):
        (folder / "chat_template.jinja").write_text(source)
        lines = [{"chat": list(messages), "variables": v} for messages, v in requests]
        return ask(command_in(native_build), folder, lines)

    (said,) = rendered("a", [(CHATS[0], {})])
    if "minja was absent" in str(said):
        pytest.skip(said["error"])
    return rendered


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_chats_of_the_corpus_are_those_of_transformers(render, name):
    source = CORPUS[name].config["chat_template"]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), **TOKENS)
    theirs.chat_template = source
    requests, wanted = [], []
    for chat in CHATS:
        for variables in ({"tools": tools, "add_generation_prompt": prompt}
                          for tools in (None, [TOOL]) for prompt in (True, False)):  # fmt: skip
            requests.append((chat, variables))
            wanted.append(theirs.apply_chat_template(list(chat), tokenize=False, **variables))
    assert render(source, requests) == wanted


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_templates_like_published_ones(render, name):
    ours = ChatTemplate(TEMPLATES[name], TOKENS)
    for messages in CONVERSATIONS:
        (said,) = render(TEMPLATES[name], [(messages, {})])
        try:
            wanted = ours.render(messages)
        except Exception:
            assert "error" in said
            continue
        assert said == wanted, messages


def test_messages_that_leave_no_trace_are_refused(render):
    for source, messages in TAKEN:
        wanted = ChatTemplate(source, {}).render(messages)
        assert render(source, [(messages, {})]) == [wanted], source
    for source, messages, words in LOST:
        (said,) = render(source, [(messages, {})])
        place = words.split(",")[0]
        assert said["error"].startswith(place) and "leaves no trace" in said["error"]


def test_parts_are_joined_or_read_and_names_leave_a_trace(render):
    for source, messages, text in JOINED:
        assert render(source, [(messages, {})]) == [text], (source, messages)
    for source, messages, words in NAMES:
        (said,) = render(source, [(messages, {})])
        if words is None:
            assert said == ChatTemplate(source, {}).render(messages)
        else:
            begin = words.replace("'", '"')
            assert said["error"].startswith(f"{begin}, which leaves no trace in the prompt: ")


def test_arguments_are_what_a_template_wants(render):
    end = "{% endfor %}{% endfor %}"
    for written_as, expected in WANTED:
        if "format(" in written_as or "|items|list" in written_as:  # minja has neither form
            continue
        source = f"{WRITE}{{{{ c.function.name }}}}:{written_as}{end}"
        text = '{"b":"\\u00f6", "a":[1.0,{}]}'
        (said,) = render(source, [([message("assistant", "", call("f", text))], {})])
        assert said == f"f:{expected}", written_as


def test_the_checks_find_templates_that_minja_renders_otherwise(render, native_build, tmp_path):
    """minja keeps a variable of a generation tag, and knows neither dict() nor sort."""
    for name, renders in (("llama", True), ("mistral", True), ("chatml", False), ("loops", False)):
        folder = written("llama_2", tmp_path)
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))
        (folder / "chat_template.jinja").write_text(TEMPLATES[name])
        write_text_checks(folder, None)
        (found,) = ask(command_in(native_build), folder, [{"check": True}])
        assert (found["encodes"], found["renders"]) == (True, renders), found


def test_a_missing_header_is_named_at_every_call(tmp_path):
    (tmp_path / "usr").mkdir()
    (tmp_path / "complete").touch()  # all but the header has been downloaded
    environment = {
        **{name: value for name, value in os.environ.items() if name != "DSBD_MINJA_DIR"},
        **{"DSBD_NATIVE_PACKAGES": str(tmp_path), "https_proxy": "http://127.0.0.1:9"},
    }
    command = [sys.executable, "-m", "scripts.native_packages"]
    header = tmp_path / "usr" / "include" / "minja" / "minja.hpp"
    for words in ("no chats: https://", "-DDSBD_MINJA_DIR=DIR", ""):
        if not words:
            header.parent.mkdir(parents=True)
            header.touch()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'usr'}\n"), done.stderr
        assert words in done.stderr and bool(words) == bool(done.stderr)


def test_a_folder_without_the_header_is_refused(native_build, tmp_path):
    packages = cached(native_build, "CMAKE_PREFIX_PATH")
    options = [f"-DCMAKE_PREFIX_PATH={packages}", f"-DDSBD_MINJA_DIR={tmp_path}"]
    command = ["cmake", "-S", ROOT / "native" / "text", "-B", tmp_path / "build", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = " ".join(done.stderr.split())  # CMake breaks lines by the length of the folder
    assert done.returncode == 1 and "which has no minja/minja.hpp; give the folder" in said


def test_refusals_say_what_is_wrong(render):
    plain = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    user = {"role": "user", "content": "a"}
    picture = {"role": "user", "content": [{"type": "image"}]}
    wrong = [
        (plain, [], "messages is []"),
        (plain, ["a"], 'messages[0] is "a"'),
        (plain, [picture], "messages[0].content[0] is a part of type"),
        (plain, [{"role": "user", "content": [5]}], "messages[0].content[0] is 5; expected a text"),
        (plain, [message("assistant", "", call())], "does not read tool calls"),
        (plain, [{**user, "content": "a\u00a0"}], "begins or ends with the space"),
        ("{{ raise_exception('never') }}", [user], "refuses these messages: never"),
        ("{{ messages | later }}", [user], "chat template"),
        (WRITE + "{% endfor %}{% endfor %}", [message("assistant", "", call("f", "["))],
         "messages[0].tool_calls[0].function.arguments is invalid JSON"),
    ]  # fmt: skip
    for source, messages, words in wrong:
        (said,) = render(source, [(messages, {})])
        assert words in said["error"] and "\n" not in said["error"], source
