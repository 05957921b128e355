"""Constraints over HTTP, by every field that gives one: what Python gives, faults named."""

import json

import pytest

from dsbd_ort import TokenTrie
from dsbd_ort.constraints.trial import GrammarTrialError
from dsbd_ort.openai_server.errors import rejection
from tests.constraints.json_schemas import SCHEMAS
from tests.openai_server.running_server import MODEL

PROMPT = "def f("
GRAMMAR = 'start: "[" item ("," item){0,2} "]"\nitem: /[a-c]{1,3}/'
SCHEMA = SCHEMAS["object"]


FIELDS = [
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": SCHEMA, "strict": True},
            }
        },
        {"json_schema": SCHEMA},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
        {"json_schema": SCHEMA, "flexible_whitespace": True},
    ),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "[ab]{3,5}"}}, {"regex": "[ab]{3,5}"}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    ({"structured_outputs": {"grammar": GRAMMAR}}, {"grammar": GRAMMAR}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_regex": "[ab]{3,5}"}, {"regex": "[ab]{3,5}"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ({"guided_grammar": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"constraint": {"regex": "[ab]{3,5}"}}, {"regex": "[ab]{3,5}"}),
]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(("fields", "data"), FIELDS)
def test_every_field_gives_what_python_gives(client, pipeline, fields, data, num_beams):
    options = {"strategy": "speculative", "seed": 4}
    if num_beams > 1:
        options = {"strategy": "dsbd", "num_beams": num_beams, "seed": 4}
    wanted = pipeline.generate(PROMPT, max_new_tokens=60, constraint=data or None, **options)
    common = {"model": MODEL, "max_tokens": 60, "extra_body": {**fields, **options}}
    (choice,) = client.completions.create(prompt=PROMPT, logprobs=0, **common).choices
    assert choice.text == wanted.sequences[0].text
    assert choice.logprobs.token_logprobs == pytest.approx(
        wanted.sequences[0].token_logprobs, abs=1e-4
    )
    message = {"role": "user", "content": "go"}
    prompt = pipeline.chat_prompt([message])
    wanted = pipeline.generate(prompt, max_new_tokens=60, constraint=data or None, **options)
    (answer,) = client.chat.completions.create(messages=[message], **common).choices
    assert answer.message.content == wanted.sequences[0].text
    stream = client.chat.completions.create(messages=[message], stream=True, **common)
    texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(texts) == wanted.sequences[0].text


REFUSED = [  # fields, param, words
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format",
        "use type json_schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "expected one of json_schema"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "not permitted"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "constraint has regex and choice; give one of them",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "response_format and structured_outputs contradict each other",
    ),
    ({"guided_choice": []}, "guided_choice", "give a list of at least one text"),
    ({"constraint": {"trie": "/etc/passwd"}}, "constraint", "this server has none"),
    ({"constraint": {"regx": "a"}}, "constraint", "did you mean 'regex'?"),
    ({"guided_regex": "("}, "guided_regex", "the regex '(' is not a usable grammar"),
    ({"guided_grammar": "begin: a"}, "guided_grammar", "is not a usable grammar"),
    (
        {"guided_json": {"type": "object", "unevaluatedProperties": False}},
        "guided_json",
        "unevaluatedProperties",
    ),
    ({"guided_json": {"minimum": 3, "maximum": 1, "type": "integer"}}, "guided_json", "minimum"),
    ({"guided_json": {"oneOf": [{"type": "integer"}, {}]}}, "guided_json", "use anyOf"),
    ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
    (
        {"guided_decoding_backend": "xgrammar"},
        "guided_decoding_backend",
        "only one backend",
    ),
    (
        {"response_format": {"type": "json_object"}, "n": 2, "eos_token_id": 999},
        "eos_token_id",
        "expected 0 to",
    ),
]


ASKED = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_a_fault_is_one_clear_400(server, fields, param, words):
    for path, body in ASKED.items():
        answer = server.http.post(f"/v1/{path}", json={"model": MODEL, **body, **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["param"] == param and words in error["message"], error


def test_a_path_with_nowhere_to_go_is_no_failure_of_the_server(server):
    body = {
        "model": MODEL,
        "prompt": "a",
        "suppress_tokens": list(range(258)),
        "constraint": {"regex": "ab"},
    }
    answer = server.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "constraint_failed"), error
    assert "leave no token to any beam" in error["message"]
    events = server.http.post("/v1/completions", json={**body, "stream": True})
    assert '"code": "constraint_failed"' in events.text and events.text.endswith("[DONE]\n\n")
    del body["suppress_tokens"]
    assert server.http.post("/v1/completions", json=body).status_code == 200


def test_a_trie_beyond_the_vocabulary_ends_the_start(serve):
    trie = TokenTrie.from_sequences([[1, 5000]])
    with pytest.raises(ValueError, match="has the token id 5000; expected 0 to 257"):
        with serve(tries={"items": trie}):
            pass


TWO_CHOICES = {"model": MODEL, "n": 4, "use_beam_search": True, "max_tokens": 4}
TWO_CHOICES |= {"structured_outputs": {"choice": ["a", "b"]}}


def test_a_search_returns_as_many_choices_as_there_are_answers(server):
    """Each choice is whole, is one that no other is, and is of the prompt that its index says."""
    body = {**TWO_CHOICES, "prompt": ["def f(", "import "]}
    answer = server.http.post("/v1/completions", json=body).json()
    choices = {choice["index"]: choice for choice in answer["choices"]}
    assert list(choices) == [0, 1, 4, 5]
    for of_prompt in ((0, 1), (4, 5)):
        assert {choices[index]["text"] for index in of_prompt} == {"a", "b"}
    alone = server.http.post("/v1/completions", json={**body, "prompt": "import "}).json()
    scores = [choices[index]["dsbd"]["score"] for index in (4, 5)]
    wanted = [choice["dsbd"]["score"] for choice in alone["choices"]]
    assert scores == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("path", ASKED)
def test_a_choice_that_a_stream_begins_ends(server, path):
    body = {**TWO_CHOICES, **ASKED[path], "stream": True}
    answer = server.http.post(f"/v1/{path}", json=body)
    chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert sorted({choice["index"] for choice in choices}) == [0, 1]
    assert sorted(c["index"] for c in choices if c["finish_reason"] == "stop") == [0, 1]
    if path != "completions":
        assert [c["delta"].get("role") for c in choices].count("assistant") == 2
        assert choices[0]["delta"]["role"] == "assistant"


def test_a_grammar_that_no_process_could_try_may_be_sent_again():
    response = rejection(GrammarTrialError("cannot be started (Too many open files)"))
    assert response.status == 503 and response.headers == {"Retry-After": "1"}
    assert "Too many" not in response.message


def test_a_schema_that_would_fail_midway_is_refused_at_the_start(server):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(200)}}
    body = {"model": MODEL, "prompt": PROMPT, "guided_json": {"$defs": {"x": schema}, **schema}}
    answer = server.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "guided_json"
    assert "too much may follow at one place" in error["message"] and error["code"] is None
