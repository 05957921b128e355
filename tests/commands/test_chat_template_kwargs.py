"""Chat templates for one prompt, a chat and a batch: more variables, messages that they drop."""

import json

import pytest

from dsbd_ort import Pipeline, Service
from dsbd_ort.cli import run
from tests.commands.calls import answered, assert_one_line_error, called
from tests.runtime.bundle_edits import with_files

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}{{ mood }}"
MOOD = {"mood": "glad"}
ASKED = ["--chat", "--max-new-tokens", "6", "--seed", "3", "--top-k", "20"]


@pytest.fixture(scope="module")
def chat_bundle(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "bundle"
    return with_files(tiny_bundle.path, folder, {"chat_template.jinja": TEMPLATE})


@pytest.fixture(scope="module")
def answer(chat_bundle):
    with Pipeline.from_bundle(chat_bundle, chat_defaults=True) as pipeline:
        ids = pipeline.chat_prompt([{"role": "user", "content": "hi"}], chat_template_kwargs=MOOD)
        assert pipeline.tokenizer.decode(ids) == "hi;glad"
        with Service(pipeline) as service:
            message = {"role": "user", "content": "hi"}
            assert service.chat_prompt([message], chat_template_kwargs=MOOD) == ids
        return pipeline.generate(ids, max_new_tokens=6, seed=3, top_k=20).sequences[0].text


def dsbd_run(bundle, *arguments):
    return called(run, bundle, *ASKED, *arguments)


def test_one_prompt(chat_bundle, answer):
    done = dsbd_run(chat_bundle, "--prompt", "hi", "--chat-template-kwargs", json.dumps(MOOD))
    assert done.stdout == f"{answer}\n"
    assert dsbd_run(chat_bundle, "--prompt", "hi").stdout != done.stdout


def test_a_batch_and_its_fingerprint(chat_bundle, answer, tmp_path):
    lines = [
        {"prompt": "hi", "seed": 3},
        {"messages": [{"role": "user", "content": "hi"}], "seed": 3},
    ]
    mood = ["--chat-template-kwargs", json.dumps(MOOD)]
    found = answered(chat_bundle, tmp_path, lines, *ASKED, *mood)
    assert [line["sequences"][0]["text"] for line in found] == [answer] * 2
    files = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    other = dsbd_run(chat_bundle, *files, "--chat-template-kwargs", '{"mood": "sad"}')
    assert other.exit_code == 2 and "of another input or other options" in other.stderr


def test_a_chat_has_defaults_of_its_own_unless_it_wants_none(chat_bundle, caplog):
    asked = ["--chat", "--prompt", "hi", "--seed", "3", "--min-new-tokens", "70", "--json"]
    found = []
    for flags in ([], ["--no-chat-defaults"]):
        done = called(run, chat_bundle, *asked, *flags)
        (sequence,) = json.loads(done.stdout)["sequences"]
        assert sequence["finish_reason"] in ("eos", "length")
        found.append((sequence["token_ids"], "temperature 0.7, top_p 0.9" in caplog.text))
        caplog.clear()
    (tokens, is_said), (plain_tokens, is_said_of_plain) = found
    assert (is_said, is_said_of_plain) == (True, False)
    assert len(plain_tokens) == 64 < len(tokens)
    with Pipeline.from_bundle(chat_bundle) as pipeline:
        prompt = pipeline.chat_prompt([{"role": "user", "content": "hi"}])
        sampling = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 2048 - len(prompt)}
        for options, expected in (({}, plain_tokens), (sampling, tokens)):
            wanted = pipeline.generate(prompt, seed=3, min_new_tokens=70, **options)
            assert wanted.sequences[0].token_ids == expected


def test_messages_that_the_template_drops(tiny_bundle, tmp_path):
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    bundle = with_files(tiny_bundle.path, tmp_path / "bundle", {"chat_template.jinja": source})
    done = dsbd_run(bundle, "--system", "brief", "--prompt", "hi")
    assert done.exit_code == 2 and done.stdout == ""
    assert "messages[0], of role 'system', leaves no trace in the prompt" in done.stderr
    user, critic = ({"role": role, "content": "hi"} for role in ("user", "critic"))
    lines = [{"messages": [user, critic]}, {"messages": [user, user]}]
    refused, taken = answered(bundle, tmp_path, lines, *ASKED)
    assert "messages[1], of role 'critic', leaves no trace" in refused["error"]
    assert taken["sequences"]


WRONG = [
    (["--chat-template-kwargs", "{"], "'{' is invalid JSON"),
    (["--chat-template-kwargs", "[1]"], "'[1]' is not a JSON object such as"),
    (["--chat-template-kwargs", "[" * 100_000], "is invalid JSON"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_no_json_object_is_refused(chat_bundle, arguments, words):
    assert_one_line_error(dsbd_run(chat_bundle, "--prompt", "hi", *arguments), words)


def test_it_needs_a_chat(chat_bundle):
    done = called(run, chat_bundle, "--prompt", "hi", "--chat-template-kwargs", "{}")
    assert "--chat-template-kwargs needs --chat" in done.stderr
