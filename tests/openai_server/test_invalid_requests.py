"""Invalid requests: status 400, and the error names the field."""

import json
import re

import pytest

from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.engine import ServiceLimits
from tests.openai_server.fakes import ScriptedService
from tests.openai_server.running_server import MODEL, running_server


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


COMPLETION = {"model": MODEL, "prompt": "def f(", "max_tokens": 2}
CHAT = {"model": MODEL, **user("a"), "max_tokens": 2}
REFUSED = [
    ({"frequency_penalty": True}, "frequency_penalty"),
    ({"echo": True, "stream": True, "logprobs": 1}, "echo"),
    ({"logprobs": 21}, "logprobs"),
    ({"ignore_eos": True, "eos_token_id": 5}, "ignore_eos"),
    ({"stop_token_ids": [258_000]}, "stop_token_ids"),
    ({"use_beam_search": True, "strategy": "dsbd"}, "use_beam_search"),
    ({"logprobs": -1}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": "5"}, "top_k"),
    ({"strategy": "magic"}, "strategy"),
    ({"strategy": ["dsbd"]}, "strategy"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 0, "strategy": "dsbd"}, "temperature"),
    ({"temperature": 0, "coupling": "gumbel"}, "coupling"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
    ({"n": 17}, "n"),
    ({"n": 2, "num_return_sequences": 3}, "num_return_sequences"),
    ({"n": 3, "num_beams": 2, "use_beam_search": True}, "num_beams"),
    ({"num_return_sequences": 3, "num_beams": 2}, "num_beams"),
    ({"num_return_sequences": 2, "strategy": "speculative"}, "num_return_sequences"),
    ({"num_return_sequences": "2"}, "num_return_sequences"),
    ({"max_tokens": 2, "max_new_tokens": 3}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": None, "max_new_tokens": 0}, "max_new_tokens"),
    ({"min_tokens": 2**31}, "min_tokens"),
    ({"prediction": {"type": "content", "content": "a"}, "strategy": "sample"}, "prediction"),
    ({"n": None, "best_of": 17}, "best_of"),
    ({"num_return_sequences": 17}, "num_return_sequences"),
    (
        {"n": 2, "num_return_sequences": None, "strategy": "speculative", "num_beams": 2},
        "num_beams",
    ),
    ({"max_tokens": 4000}, "prompt"),  # more than the context holds
    ({"stop": "a", "stop_strings": "b"}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_strings": [""]}, "stop_strings"),
    ({"stop": [str(number) for number in range(17)]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"num_beams": 17}, "num_beams"),
    ({"strategy": "mjgd", "joint_beams": 17}, "joint_beams"),
    ({"draft_length": 100, "draft_beams": 4}, "draft_beams"),
    ({"eos_token_id": list(range(65))}, "eos_token_id"),
    ({"eos_token_id": 2**63, "strategy": "beam-search"}, "eos_token_id"),
    ({"seed": 2**128, "n": 2, "strategy": "sample"}, "seed"),
    ({"eos_token_id": [97, 258], "strategy": "beam-search"}, "eos_token_id"),
    ({"strategy": "beam-sample", "draft_beams": 4}, "draft_beams"),
    ({"width_policy": "fixed", "accept_threshold": 0.5}, "accept_threshold"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [258_000]}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt.1"),
    ({"prompt": {"text": "a"}}, "prompt"),
]
CHAT_REFUSED = [
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    (user(5), "messages.0.content"),
    (user([{"type": "image_url", "image_url": "x"}]), "messages.0.content.0.image_url"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages.0.refusal"),
    (user("a" * 3000), "messages"),
    ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
]


PARTS = [{"type": "text", "text": "a"}, {"type": "video_url", "video_url": {"url": "x"}}]
LATER = {"type": "text", "text": "a", "until": 5}
REASONS = [  # of values of several types: that of the one meant
    (
        user(PARTS),
        "messages.0.content.1: a part of type 'video_url' is not supported: this server reads "
        "text, and sound or pictures if its model does; use parts of type 'text', 'input_audio' or "
        "'image_url'",
    ),
    (user([PARTS[0], LATER]), "messages.0.content.1.until: Extra inputs are not permitted"),
    (
        user([{"type": "text"}]),
        "messages.0.content.0: a part of type 'text' has no content; expected 'text' alone",
    ),
    (
        user([{**PARTS[0], "image_url": {"url": "x"}}]),
        "messages.0.content.0: a part of type 'text' has 'text' and 'image_url'; expected 'text' "
        "alone",
    ),
    (user([PARTS[0], "b"]), "messages.0.content.1: Input should be an object"),
    (user(5), "messages.0.content: Input should be a valid string or a valid list"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    (
        {"tool_choice": "f"},
        "tool_choice: Input should be 'none', 'auto' or 'required' or an object",
    ),
    ({"stop": ["a", 5]}, "stop.1: Input should be a valid string"),
    ({"guided_json": 5}, "guided_json: Input should be an object or a valid string"),
]


@pytest.mark.parametrize(("fields", "reason"), REASONS, ids=str)
def test_the_reason_is_that_of_what_was_meant(server, fields, reason):
    error = refusal(server, "/v1/chat/completions", {**CHAT, **fields})
    assert error["message"] == reason and error["param"] == reason.partition(":")[0]


CACHED = {"cache_control": {"type": "ephemeral"}}
TEXTS = [
    {"type": "text", "text": "a", **CACHED},
    {"type": "text", "text": "b", "image_url": None},
]


def test_hints_of_other_servers_change_nothing(server):
    answers = []
    for messages in (
        [{"role": "user", "content": "a\nb"}],
        [{"role": "user", "content": TEXTS, **CACHED}],
    ):
        body = {**CHAT, "messages": messages, "seed": 5, "max_tokens": 8}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        usage.pop("prompt_tokens_details", None)  # of the second the rows are there
        answers.append((answer.json()["choices"][0]["message"], usage))
    assert answers[0] == answers[1]


def refusal(server, path, body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


TAKEN = [  # redundant values, and values that the server sets itself
    {"temperature": 0, "top_p": 0.95, "seed": 3},
    {"temperature": 0, "n": 2, "num_beams": 3},
    {"strategy": "beam-search", "n": 3, "best_of": 4},
    {"strategy": "beam-sample", "n": 3},
    {"width_policy": "fixed", "n": 4, "accept_threshold": 0.7},
    {"draft_length": 0, "n": 4},
    {"n": 4, "min_beams": 4},
    {"strategy": "greedy", "n": 1, "num_beams": 1, "temperature": 1},
    {"strategy": "greedy", "n": 2},
    {"seed": 2**128 - 1, "n": 2},
    {"n": 1, "num_return_sequences": 1},
    {"n": 2, "num_return_sequences": 2, "strategy": "beam-search"},
    {"top_k": -1},
    {"ignore_eos": True, "min_tokens": 2},
    {
        "min_tokens": 0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "spaces_between_special_tokens": True,
    },
    {"use_beam_search": False, "stop_token_ids": [], "include_stop_str_in_output": False},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}, "top_logprobs": 0, "n": 1, "top_p": 1, "seed": None},
]


@pytest.mark.parametrize("fields", TAKEN, ids=str)
def test_neutral_options_are_taken(server, fields):
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        if "best_of" in fields and body is CHAT:
            continue
        answer = server.http.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == fields.get("n", 1)


NAMES_OF_OPTIONS = {"max_new_tokens", "min_new_tokens", "stop_strings", "predicted_token_ids"}


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_completions_refuse(server, fields, param):
    error = refusal(server, "/v1/completions", {**COMPLETION, **fields})
    assert error["param"] == param
    assert not NAMES_OF_OPTIONS.difference(fields) & {*re.findall(r"\w+", error["message"])}


def test_an_error_in_a_stream_has_the_name_that_was_sent(pipeline):
    script = lambda: iter([ConstraintError("nothing may follow")])  # noqa: E731
    with running_server(ScriptedService(pipeline, script)) as server:
        body = {**COMPLETION, "stream": True, "guided_choice": ["a"]}
        *_, error, _ = server.http.post("/v1/completions", json=body).text.strip().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["param"] == "guided_choice"


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED, ids=str)
def test_chat_refuses(server, fields, param):
    assert refusal(server, "/v1/chat/completions", {**CHAT, **fields})["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"\xff\xfe{",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "stop": ["\\ud800"]}',
        b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
        b'{"model": "tiny", "prompt": "a", "strategy": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "' + b"x" * 100_000 + b'": 1}',
    ],
    ids=lambda body: ascii(body[:60]),
)
def test_malformed_bodies_get_a_400(server, body):
    answer = server.http.post(
        "/v1/completions",
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=10,
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 1000


VALID = b'{"model": "tiny", "prompt": "a", "max_tokens": 2}'


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "x", "text/xml; a=b"])
def test_a_body_of_another_type_is_a_400_that_names_it(server, kind):
    answer = server.http.post("/v1/completions", content=VALID, headers={"Content-Type": kind})
    assert answer.status_code == 400
    kind = kind.partition(";")[0]
    message = f"Content-Type is {kind!r}; expected application/json"
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": ""}]
)
def test_json_without_its_type_is_taken_but_not_from_another_site(server, headers):
    url = "/v1/completions"
    answer = server.http.post(url, content=VALID, headers=headers)
    assert answer.status_code == 200, answer.text
    assert 1 <= answer.json()["usage"]["completion_tokens"] <= 2
    wrong = server.http.post(url, content=b"a=b", headers=headers)
    assert wrong.status_code == 400 and "invalid JSON" in wrong.json()["error"]["message"]
    other = server.http.post(url, content=VALID, headers={**headers, "Origin": "http://else.where"})
    assert other.status_code == 400
    assert "expected application/json" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "meant"), [("temprature", "temperature"), ("max_token", "max_tokens")]
)
def test_an_unknown_field_is_refused_with_the_nearest_one(server, field, meant):
    answer = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", field: 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["message"] == f"unknown field {field!r}; did you mean {meant!r}?"


ENDPOINTS_OF_TEXTS = (
    "this server has POST /v1/completions, POST /v1/chat/completions, POST /v1/responses, "
    "GET /v1/models, GET /v1/models/{name}, GET /health, GET /ready, GET /metrics"
)


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/", f"unknown path /; {ENDPOINTS_OF_TEXTS}"),
        ("POST", "/v1/embeddings", f"unknown path /v1/embeddings; {ENDPOINTS_OF_TEXTS}"),
        ("GET", "/v1/responses/r1", f"/v1/responses/r1 is not supported; {ENDPOINTS_OF_TEXTS}"),
        ("GET", "/v1/completions", "GET /v1/completions is not supported; use POST"),
        ("POST", "/v1/models", "POST /v1/models is not supported; use GET"),
        ("DELETE", "/v1/models", "DELETE /v1/models is not supported; use GET"),
        ("GET", "/v1/models/a/", "unknown model 'a'; use 'tiny'"),
        ("GET", "/v1/completions/", "GET /v1/completions is not supported; use POST"),
    ],
)
def test_an_unknown_path_is_answered_by_those_there_are(server, method, path, words):
    answer = server.http.request(method, path, json=None if method == "GET" else {"model": "m"})
    assert answer.status_code == (405 if "supported; use " in words else 404)
    assert answer.json()["error"]["message"] == words
    long = server.http.get("/" + "x" * 5000).json()["error"]["message"]
    assert long.endswith(ENDPOINTS_OF_TEXTS) and len(long) < 400


def test_a_slash_at_the_end_changes_nothing(server):
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    for path, body in (("/v1/completions//", COMPLETION), ("/v1/chat/completions/", CHAT)):
        assert server.http.post(path, json=body).status_code == 200
    assert 'path="/v1/models"' in server.http.get("/metrics/").text
    assert 'path="/v1/models/"' not in server.http.get("/metrics/").text


def test_more_than_the_server_ever_holds_is_no_429(serve):
    with serve(limits=ServiceLimits(max_requests=1, max_queued=3)) as small:
        error = refusal(small, "/v1/completions", {**COMPLETION, "prompt": ["a"] * 5})
        assert "5 engine requests" in error["message"]
        body = {**COMPLETION, "prompt": ["a"] * 3}
        assert small.http.post("/v1/completions", json=body).status_code == 200


def test_the_servers_own_limits(serve):
    with serve(max_prompt_tokens=5, max_new_tokens=3, max_prompts=1, max_best_of=1) as small:
        body = {"model": MODEL, "prompt": "a"}
        answer = small.http.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3  # less than what is usual
        for fields, param in (
            ({"prompt": "abcdefg"}, "prompt"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"max_tokens": 4}, "max_tokens"),
            ({"max_new_tokens": 4}, "max_new_tokens"),
            ({"n": 2}, "n"),
        ):
            assert refusal(small, "/v1/completions", {**body, **fields})["param"] == param
        error = refusal(small, "/v1/completions", {**body, "prompt": "abcdefg"})
        assert "exceeds the available context size" in error["message"]


NUMBER_FIELDS = {*DecodingConfig.__dataclass_fields__, "max_completion_tokens"}
NUMBER_FIELDS |= set("n max_tokens logprobs best_of stop user stream prompt".split())
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000]
NO_NUMBERS += ["[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 900 + "NaN" + "}" * 900]


@pytest.mark.parametrize("name", sorted(NUMBER_FIELDS))
def test_values_that_are_no_number_get_a_400_in_strict_json(server, name):
    for value in NO_NUMBERS:
        prompt = "" if name == "prompt" else '"prompt": "x", '
        body = f'{{"model": "tiny", {prompt}"{name}": {value}}}'
        answer = server.http.post("/v1/completions", content=body)
        assert answer.status_code == 400, (value[:20], answer.text)
        assert len(answer.content) < 1000
        error = json.loads(answer.text, parse_constant=pytest.fail)["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
