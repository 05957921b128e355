"""dsbd-serve as a process: SIGTERM drains, a timeout or a second signal cancels."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from dsbd_ort import StreamPiece
from lab.frame.server_process import server_process
from tests.openai_server.fakes import ScriptedService
from tests.openai_server.running_server import MODEL, running_server

BODY = {  # a call a token, and nothing ends it: long enough to be ended in
    "model": "tiny",
    "prompt": "a",
    "max_tokens": 1500,
    "stream": True,
    "strategy": "sample",
    "eos_token_id": [],
}
SLOWLY = "--loop", "python"  # the core is done before the signal comes


def test_sigterm_lets_requests_in_flight_finish(chat_bundle):
    with (
        server_process(chat_bundle, "--threads", 1, *SLOWLY) as server,
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


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_left_after_the_timeout_or_a_second_signal_get_an_error(
    chat_bundle, number, signals
):
    patience = "0.1" if signals == 1 else "60"
    with (
        server_process(chat_bundle, "--shutdown-timeout", patience, *SLOWLY) as server,
        ThreadPoolExecutor() as threads,
        httpx2.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=30) as answer,
    ):
        whole = threads.submit(
            httpx2.post,
            f"{server.url}/v1/completions",
            json={**BODY, "stream": False, "max_tokens": 1900},
            timeout=30,
        )
        events = answer.iter_lines()
        next(events)
        for _ in range(signals):
            time.sleep(0.2)
            server.process.send_signal(number)
        *_, error, done = [line for line in events if line]
        assert '"code": "shutting_down"' in error and done == "data: [DONE]"
        assert whole.result().status_code == 503
        assert server.process.wait(10) == 0
        assert "2 requests are cancelled" in server.log() and "ERROR" not in server.log()


@pytest.mark.parametrize("signals", [2, 3])
def test_clients_that_do_not_read_are_disconnected_without_a_traceback(pipeline, caplog, signals):
    def many():
        yield from [StreamPiece([65], "x" * 65_536, [-1.0])] * 300

    body = {"model": MODEL, "prompt": "a", "stream": True}
    with running_server(ScriptedService(pipeline, many), shutdown_timeout_s=60) as server:
        path = f"{server.url}/v1/completions"
        with (
            httpx2.stream("POST", path, json=body) as stays,
            httpx2.stream("POST", path, json=body) as leaves,
        ):
            server.terminate()
            time.sleep(0.2)
            leaves.close()
            for _ in range(signals - 1):
                server.terminate()
                time.sleep(0.2)
            with pytest.raises(httpx2.RemoteProtocolError):  # incomplete
                time.sleep(3)
                stays.read()
    assert "requests are cancelled" in caplog.text
    assert not [each for each in caplog.records if each.exc_info or each.levelname == "ERROR"]
