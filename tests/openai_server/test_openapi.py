"""Requests generated from the OpenAPI document, valid and not: documented responses, no 500."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.openai_server.running_server import MODEL, running_server
from tests.speech.audio_files import wav_bytes
from tests.speech.fakes import FakeSpeechService
from tests.speech.sounds import speech_like

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ROLES = ["user", "system", "assistant", "tool", "developer", "critic"]
OPERATIONS = {  # how many cases of each kind
    ("POST", "/v1/completions"): 100,
    ("POST", "/v1/chat/completions"): 100,
    ("POST", "/v1/responses"): 60,
    ("GET", "/v1/models/{name}"): 30,
    ("GET", "/v1/models"): 3,
    ("GET", "/health"): 3,
    ("GET", "/ready"): 3,
    ("GET", "/metrics"): 3,
    ("POST", "/v1/audio/transcriptions"): 25,
    ("POST", "/v1/audio/translations"): 10,
}
SOUND = wav_bytes(speech_like(0.3))


@pytest.fixture(scope="module")
def schema(serve, tool_bundle):
    with serve(
        bundle=tool_bundle, max_new_tokens=64
    ) as server:  # without max_tokens answers would be long
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def speech_schema():
    with running_server(FakeSpeechService()) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def _objects_in(value):
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _make_likely(message):
    """Give a message a role that there is, and its calls arguments that may be JSON, or empty."""
    if isinstance(role := message.get("role"), str):
        message["role"] = ROLES[len(role) % len(ROLES)]
    for call in _objects_in(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            likely = ("", "{}", json.dumps({"a": arguments}), arguments)
            function["arguments"] = likely[len(arguments) % len(likely)]


def test_every_operation_is_tried(schema, speech_schema):
    documented = {
        (operation.ok().method.upper(), operation.ok().path)
        for each in (schema, speech_schema)
        for operation in each.get_all_operations()
    }
    assert documented == {*OPERATIONS}


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
    + [(*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if "POST" in operation],
)
def test_operation(schema, speech_schema, method, path, mode):
    operation = (speech_schema if "audio" in path else schema)[path][method]

    @settings(
        max_examples=OPERATIONS[method, path],
        deadline=10_000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers_as_documented(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # else hardly anything would get past its name
            for message in _objects_in(case.body.get("messages")):
                _make_likely(message)
            content = case.body.get("file")
            if isinstance(content, bytes) and len(content) % 2:  # else a file of random bytes
                case.body["file"] = SOUND
        case.call_and_validate(checks=CHECKS, timeout=10)

    answers_as_documented()
