"""With a real service: who goes makes room, who is too many is told."""

from __future__ import annotations

import httpx2

from dsbd_ort.engine import ServiceLimits
from tests.openai_server.running_server import MODEL
from tests.openai_server.test_failures import soon

LONG = {
    "model": MODEL,
    "prompt": "a",
    "max_tokens": 1500,
    "strategy": "beam-sample",
    "num_beams": 2,
    "eos_token_id": [],
    "stream": True,
}


def test_one_too_many_is_refused_until_the_other_has_gone(serve) -> None:
    limits = ServiceLimits(max_requests=1, max_queued=0)
    with serve(limits=limits) as server, httpx2.Client(base_url=server.url) as http:
        with http.stream("POST", "/v1/completions", json=LONG):
            assert soon(lambda: server.service.stats().num_running == 1)
            refused = http.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert soon(lambda: server.service.stats().num_running == 0)
        short = {**LONG, "max_tokens": 1, "stream": False}
        assert http.post("/v1/completions", json=short).status_code == 200


def test_memory_is_bounded(serve) -> None:
    with serve(limits=ServiceLimits(kv_bytes=200_000)) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json=LONG)
        assert answer.status_code == 400
        assert "cache rows" in answer.json()["error"]["message"]
        assert server.service.stats().kv_bytes <= 200_000
