"""Requests generated from the OpenAPI document, valid and not: documented responses, no 500."""

from __future__ import annotations

from collections.abc import Iterator

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

from tests.openai_server.conftest import Serve
from tests.openai_server.running_server import MODEL

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = {  # how many cases of each kind
    ("POST", "/v1/completions"): 100,
    ("POST", "/v1/chat/completions"): 100,
    ("GET", "/v1/models/{name}"): 30,
    ("GET", "/v1/models"): 3,
    ("GET", "/health"): 3,
    ("GET", "/ready"): 3,
    ("GET", "/metrics"): 3,
}


@pytest.fixture(scope="module")
def schema(serve: Serve) -> Iterator[schemathesis.BaseSchema]:
    with serve(max_new_tokens=64) as server:  # without max_tokens answers would be long
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_tried(schema: schemathesis.BaseSchema) -> None:
    documented = {
        (operation.ok().method.upper(), operation.ok().path)
        for operation in schema.get_all_operations()
    }
    assert documented == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
    + [(*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if "POST" in operation],
)
def test_operation(
    schema: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]

    @settings(
        max_examples=OPERATIONS[method, path],
        deadline=10_000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers_as_documented(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # else hardly anything would get past its name
        case.call_and_validate(checks=CHECKS, timeout=10)

    answers_as_documented()
