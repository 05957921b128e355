"""Clients that violate the protocol: rejected or disconnected, and the next one is served."""

import contextlib
import json
import socket
import time

import httpx2
import pytest

from dsbd_ort.openai_server.middleware import ApiKeys
from tests.openai_server.running_server import MODEL

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(serve):
    """Little time for everything."""
    with serve(idle_timeout_s=1, body_timeout_s=0.5, max_body_bytes=10_000) as running:
        yield running


@pytest.fixture(scope="module")
def locked(serve):
    with serve(keys=ApiKeys(["key"])) as running:
        yield running


def said(server, *sent, pause_s=0.0):
    """Send pieces with pauses; return what came until the server closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        for piece in sent:
            connection.sendall(piece)
            time.sleep(pause_s)
        received = b""
        while piece := connection.recv(65_536):
            received += piece
        return received


def is_served(server):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=5).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD.encode()], ids=ascii)
def test_a_head_that_does_not_come(strict, sent):
    began = time.monotonic()
    assert said(strict, sent) == b""
    assert 0.5 < time.monotonic() - began < 3
    assert is_served(strict)


def test_a_body_that_does_not_come(strict):
    answer = said(strict, HEAD.encode() + b"Content-Length: 100\r\n\r\n", b'{"model"')
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"body_timeout"' in answer
    assert is_served(strict)


def test_a_body_drop_by_drop(strict):
    drops = [b"1\r\nx\r\n"] * 3  # chunks of one byte
    head = HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    began = time.monotonic()
    answer = said(strict, head, *drops, pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 0.8  # the time is that of the whole body


def test_a_connection_kept_and_not_used(strict):
    answer = said(strict, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /hea")
    assert answer.count(b"HTTP/1.1 200 OK") == 1


def test_bodies_that_are_too_large(strict):
    large = b"x" * 10_000_000
    for content in (large, iter([large[:5_000_000]] * 2)):  # with a length, and in chunks
        answer = httpx2.post(f"{strict.url}/v1/completions", content=content, timeout=5)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
    lying = HEAD.encode() + b"Content-Length: 5\r\n\r\n" + b"x" * 100
    assert said(strict, lying).startswith(b"HTTP/1.1 400 ")
    assert is_served(strict)


def test_a_head_without_end(strict):
    lines = [b"X: " + b"y" * 60_000] * 50
    with contextlib.suppress(ConnectionError):  # cut while it was still coming
        assert said(strict, HEAD.encode(), *lines).startswith(b"HTTP/1.1 400 ")
    assert is_served(strict)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../metrics/../v1/models",
        "/health/../v1/models",
        "/v1/models/../../etc/passwd",
        "//v1/models",
        "/v1//models",
        "/%76%31/models",
        "/v1/models/%2e%2e/%2e%2e/etc/passwd",
        "/health/",
        "/health%2f",
        "/health;x=/v1/models",
        "/HEALTH",
        "/health%00",
        "/metrics%0d%0aX: y",
        "*",
        "http://x/health/../v1/models",
    ],
)
def test_no_spelling_of_a_path_gets_by_without_a_key(locked, path):
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    status, _, rest = said(locked, request.encode()).partition(b"\r\n")
    assert status.split()[1] in (b"400", b"401"), (status, rest)


def test_garbage_instead_of_http(strict):
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 100 + b"\r\n\r\n", b"GET\r\n\r\n"):
        assert said(strict, garbage + b"\r\n\r\n")[:12] in (b"", b"HTTP/1.1 400")
    assert is_served(strict)


def test_no_response_names_the_server_software(server):
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1})
    for answer in (
        httpx2.get(f"{server.url}/health"),
        httpx2.get(f"{server.url}/nothing"),
        httpx2.post(f"{server.url}/v1/completions", content=body),
    ):
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


def test_an_upgrade_is_not_taken(strict):
    request = (
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert b"101" not in said(strict, request).partition(b"\r\n")[0]
