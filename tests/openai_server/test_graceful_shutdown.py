"""dsbd-serve as a process: SIGTERM drains, a timeout or a second signal cancels."""

import signal
import time

import httpx2
import pytest

from lab.frame.server_process import server_process

BODY = {  # a call a token, and nothing ends it: long enough to be ended in
    "model": "tiny",
    "prompt": "a",
    "max_tokens": 1500,
    "stream": True,
    "strategy": "sample",
    "eos_token_id": [],
}


def test_sigterm_lets_requests_in_flight_finish(chat_bundle):
    with (
        server_process(chat_bundle, "--threads", 1) as server,
        httpx2.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=30) as answer,
    ):
        events = answer.iter_lines()
        next(events)
        assert httpx2.get(f"{server.url}/ready").json() == {"status": "ready"}
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert httpx2.get(f"{server.url}/ready").status_code == 503
        assert httpx2.get(f"{server.url}/health").status_code == 200
        refused = httpx2.post(f"{server.url}/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        *_, done = [line for line in events if line]
        assert done == "data: [DONE]"
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_requests_left_after_the_timeout_are_cancelled_with_an_error(chat_bundle, signals):
    patience = "0.1" if len(signals) == 1 else "60"
    with (
        server_process(chat_bundle, "--shutdown-timeout", patience) as server,
        httpx2.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=30) as answer,
    ):
        events = answer.iter_lines()
        next(events)
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.05)
        if len(signals) == 1:
            *_, error, done = [line for line in events if line]
            assert '"code": "shutting_down"' in error and done == "data: [DONE]"
        assert server.process.wait(10) == 0
