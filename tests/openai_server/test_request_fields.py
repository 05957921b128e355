"""Every row of the table of request fields is true; docs/serving_reference.md shows the table."""

import json
from pathlib import Path

import pytest

from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.protocol import OPTION_NAMES
from dsbd_ort.openai_server.request_fields import (
    FIELDS,
    OF_ONE_ENDPOINT,
    Unused,
)
from tests.openai_server.running_server import MODEL

DOCS = Path(__file__).parents[2] / "docs" / "serving_reference.md"
COMPLETION = {"model": MODEL, "prompt": "def f(", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
ENDPOINTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
UNLIKELY = ["no such value", 0.123, {"no": "such"}, ["no such"], True]


def documented(name, field):
    """Return the row of the field in the table of docs/serving_reference.md."""
    if isinstance(field, Unused):
        return f"| `{name}` | accepted, unused | {field.meaning} |"
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    accepted = f"{values} accepted, else refused" if values else "refused"
    return f"| `{name}` | {accepted} | {field.reason} |"


def posted(server, path, body):
    return server.http.post(path, json=body)


def test_the_document_shows_every_field():
    begin, end = "<!-- request fields -->\n", "\n<!-- end of request fields -->"
    rows = DOCS.read_text().partition(begin)[2].partition(end)[0].splitlines()[2:]
    names = {row.split("`")[1] for row in rows}
    declared = {*ChatBody.model_fields, *CompletionBody.model_fields} - OPTION_NAMES
    assert names == declared | {*FIELDS} and len(rows) == len(names) >= 40
    for name, field in FIELDS.items():
        assert documented(name, field) in rows
    for row in rows:
        name, done = row.split("`")[1], row.split("|")[2].strip()
        if name not in FIELDS:
            bodies = {"chat": ChatBody, "completions": CompletionBody}
            of = [kind for kind, body in bodies.items() if name in body.model_fields]
            assert done == ("done" if len(of) == 2 else f"done, {of[0]}"), row


def test_no_body_declares_a_field_without_effect():
    for body in (ChatBody, CompletionBody):
        assert not {*body.model_fields, *OPTION_NAMES} & {*FIELDS}


@pytest.mark.parametrize("name", FIELDS)
def test_neutral_values_are_accepted_and_others_refused(server, name):
    field = FIELDS[name]
    for path, body in ENDPOINTS:
        assert posted(server, path, {**body, name: None}).status_code == 200
        if isinstance(field, Unused):
            value = {"a": "b"} if field.kind is dict else "x"
            assert posted(server, path, {**body, name: value}).status_code == 200
            answer = posted(server, path, {**body, name: 5})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name
            continue
        for value in field.neutral:
            assert posted(server, path, {**body, name: value}).status_code == 200, value
        for value in UNLIKELY:
            if value in field.neutral:
                continue
            answer = posted(server, path, {**body, name: value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, value
            if name != "min_tokens":
                assert field.reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", OF_ONE_ENDPOINT)
def test_fields_of_the_other_endpoint_are_refused(server, name):
    has_it = OF_ONE_ENDPOINT[name][0]
    path, body = next((path, body) for path, body in ENDPOINTS if path != has_it)
    answer = posted(server, path, {**body, name: 7})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name in error["message"]


def test_ends_of_sequences(client, pipeline):
    options = {"strategy": "sample", "seed": 3}
    endless = pipeline.generate("ab", max_new_tokens=40, eos_token_id=[], **options).sequences[0]
    common = {"model": MODEL, "prompt": "ab", "max_tokens": 40, "logprobs": 0}
    body = {**options, "ignore_eos": True, "min_tokens": 40}
    (choice,) = client.completions.create(**common, extra_body=body).choices
    assert (choice.text, choice.finish_reason) == (endless.text, "length")
    stop = endless.token_ids[7]
    at = endless.token_ids.index(stop) + 1
    body = {**options, "ignore_eos": True, "stop_token_ids": [stop]}
    (choice,) = client.completions.create(**common, extra_body=body).choices
    assert choice.finish_reason == "stop" and len(choice.logprobs.tokens) == at
    own = list(pipeline.bundle.manifest.target.eos_token_ids)
    wanted = pipeline.generate("ab", max_new_tokens=40, eos_token_id=[*own, stop], **options)
    body = {**options, "stop_token_ids": [stop]}
    (choice,) = client.completions.create(**common, extra_body=body).choices
    assert choice.text == wanted.sequences[0].text


def test_special_tokens_of_text_and_prompt(client, pipeline):
    eos = pipeline.bundle.manifest.target.eos_token_ids[0]
    spelled = pipeline.tokenizer.piece(eos)
    options = {"strategy": "sample", "max_new_tokens": 200}
    seed = next(
        seed
        for seed in range(100)
        if pipeline.generate("ab", seed=seed, **options).sequences[0].finish_reason == "eos"
    )
    texts = {}
    for skips in (True, False):
        for stream in (False, True):
            answer = client.completions.create(
                model=MODEL,
                prompt="ab",
                seed=seed,
                stream=stream,
                extra_body={**options, "skip_special_tokens": skips},
            )
            parts = list(answer) if stream else [answer]
            texts[skips, stream] = "".join(part.choices[0].text for part in parts)
    assert texts[True, False] == texts[True, True] and spelled not in texts[True, True]
    assert texts[False, False] == texts[False, True] == texts[True, True] + spelled


def test_variables_of_the_chat_template(server):
    plain, thinking, bare = (
        posted(server, "/v1/chat/completions", {**CHAT, **fields}).json()["usage"]["prompt_tokens"]
        for fields in (
            {},
            {"chat_template_kwargs": {"think": True}},
            {"add_generation_prompt": False},
        )
    )
    assert thinking == plain + len("<think>")
    assert bare == plain - len("assistant:")


def test_docs_are_there_with_the_option_alone(serve, server):
    assert server.http.get("/docs").status_code == 404
    with serve(shows_docs=True) as own:
        page = own.http.get("/docs")
    assert page.status_code == 200 and "swagger" in page.text
