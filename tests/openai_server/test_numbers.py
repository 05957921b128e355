"""Numbers that JSON does not have, or that no float holds, in every number of a body."""

from __future__ import annotations

import dataclasses
import json

import httpx2
import pytest

from dsbd_ort.decoding import DecodingConfig
from tests.openai_server.running_server import RunningServer

NAMES = {field.name for field in dataclasses.fields(DecodingConfig)}
NAMES |= {"n", "max_tokens", "max_completion_tokens", "logprobs", "best_of", "stop", "user"}
NAMES |= {"frequency_penalty", "presence_penalty", "top_logprobs", "logit_bias", "stream", "prompt"}
VALUES = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000]
VALUES += ["[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 900 + "NaN" + "}" * 900]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_number_that_is_none_gets_a_400_in_strict_json(server: RunningServer, name: str) -> None:
    for value in VALUES:
        prompt = "" if name == "prompt" else '"prompt": "x", '
        body = f'{{"model": "tiny", {prompt}"{name}": {value}}}'
        answer = httpx2.post(f"{server.url}/v1/completions", content=body, timeout=60)
        assert answer.status_code == 400, (value[:20], answer.text)
        assert json.loads(answer.text, parse_constant=pytest.fail)["error"]["message"]
