"""API keys: their file, the header, the paths without authentication."""

import httpx2
import openai
import pytest

from dsbd_ort.openai_server.errors import ServingError
from dsbd_ort.openai_server.middleware import ApiKeys, read_api_keys
from tests.openai_server.running_server import MODEL


@pytest.fixture(scope="module")
def locked(serve):
    with serve(keys=ApiKeys(["key-one", "key-two"])) as running:
        yield running


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        (b"Bearer key-one", True),
        (b"Bearer key-two", True),
        (b"bearer  key-two", True),
        (b"Bearer key-three", False),
        (b"Bearer key-on", False),
        (b"Bearer ", False),
        (b"Basic key-one", False),
        (b"key-one", False),
        (b"Bearer \xff\xfe", False),
        (b"", False),
        (None, False),
    ],
)
def test_one_of_the_keys(header, is_accepted):
    assert ApiKeys(["key-one", "key-two"]).accept(header) is is_accepted


def test_a_file_of_keys(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("# of the team\n\n  key-one  \nkey-two\n")
    file.chmod(0o600)
    keys = read_api_keys(file)
    assert keys.accept(b"Bearer key-one") and keys.accept(b"Bearer key-two")
    assert not keys.accept(b"Bearer # of the team") and not caplog.records
    file.chmod(0o644)
    read_api_keys(file)
    assert f"run: chmod 600 {file}" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# nothing\n", "has no API key"),
        (b"two words\n", "key 1 of"),
        ("schlüssel\n".encode(), "key 1 of"),
        (b"\xff\n", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_none(tmp_path, content, message):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ServingError, match=message):
        read_api_keys(file)


def test_the_client_with_and_without_a_key(locked):
    with locked.client("key-two") as client:
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
    for wrong in ("key-three", "none"):
        with locked.client(wrong) as client, pytest.raises(openai.AuthenticationError) as refused:
            client.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert refused.value.code == "invalid_api_key"
    answer = httpx2.get(f"{locked.url}/v1/models")
    assert answer.status_code == 401 and "is missing" in answer.json()["error"]["message"]
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_open_paths(locked, serve):
    for path in ("/health", "/ready", "/metrics"):
        assert httpx2.get(f"{locked.url}{path}").status_code == 200
        assert httpx2.get(f"{locked.url}{path}/").status_code == 401
    with serve(keys=ApiKeys(["key"]), keys_everywhere=True) as closed:
        for path in ("/health", "/ready", "/metrics"):
            assert httpx2.get(f"{closed.url}{path}").status_code == 401
            known = {"Authorization": "Bearer key"}
            assert httpx2.get(f"{closed.url}{path}", headers=known).status_code == 200


def test_without_a_key_a_body_is_not_even_looked_at(locked):
    for body in (b"{", b"x" * 2_000_000):
        assert httpx2.post(f"{locked.url}/v1/completions", content=body).status_code == 401
