"""Files at URLs: what is fetched, from which addresses, and within which limits."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsbd_ort.openai_server.media_urls import MediaFetcher, is_public
from dsbd_runtime.errors import InputError

PICTURE = bytes(range(256)) * 4


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, value = self.path.lstrip("/").partition("?")
        if name == "to":
            self.send_response(302)
            self.send_header("Location", value)
            self.end_headers()
        elif name in ("missing", "broken"):
            self.send_error(404 if name == "missing" else 500)
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):  # each byte in time for a limit of one call
                self.wfile.write(b"x")
                time.sleep(0.1)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PICTURE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def is_first_host(address: str) -> bool:
    """Allow the test's own server, and no other address of this machine."""
    return address == "127.0.0.1"


@pytest.fixture
def fetch() -> MediaFetcher:
    return MediaFetcher(2000, is_allowed=is_first_host)


def refused(fetch: Callable[[str], bytes], url: str) -> str:
    with pytest.raises(InputError) as raised:
        fetch(url)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("address", "is_of_the_internet"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("127.8.9.10", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # where clouds keep credentials
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("2002:0a00:0001::1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d70e", True),
    ],
)
def test_public_addresses(address: str, is_of_the_internet: bool) -> None:
    assert is_public(address) is is_of_the_internet


def test_a_file_is_fetched_also_after_redirects(fetch: MediaFetcher, url: str) -> None:
    assert fetch(f"{url}/a.png?size=large") == PICTURE
    assert fetch(f"{url}/to?/a.png") == PICTURE
    assert fetch(f"{url}/to?{url}/to?/to?/a.png") == PICTURE
    assert fetch(f"http://user:secret@{url.removeprefix('http://')}/a.png") == PICTURE


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/missing", "its server answers 404"),
        ("/broken", "its server answers 500"),
        ("/to?/to?/to?/to?/a.png", "has more than 3 redirects"),
        ("/to?file:///etc/passwd", "leads to 'file:///etc/passwd'; expected http or https"),
        ("/to?http://127.0.0.2/a.png", "'127.0.0.2' is a private address"),
        ("/to?http://[::1]/a.png", "'::1' is a private address"),
        ("/to?http://2130706434/a.png", "is a private address"),  # 127.0.0.2 as a number
        ("/a b.png", "cannot be fetched"),
        ("/\u00e9.png", "cannot be fetched"),
    ],
)
def test_refused_files(fetch: MediaFetcher, url: str, path: str, words: str) -> None:
    assert words in refused(fetch, f"{url}{path}")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "expected http or https"),
        ("http://127.0.0.1:port/", "cannot be fetched"),
        ("http://127.0.0.1:1/", "cannot be fetched"),
        ("http://[::1/", "cannot be fetched"),
        ("http://no-such-host.invalid/", "cannot be fetched"),
    ],
)
def test_bad_urls(fetch: MediaFetcher, url: str, words: str) -> None:
    assert words in refused(fetch, url)


def test_this_machine_is_refused_by_default(url: str) -> None:
    assert "is a private address" in refused(MediaFetcher(2000), f"{url}/a.png")
    name = f"http://localhost:{url.rpartition(':')[2]}/a.png"
    assert "'localhost' is a private address" in refused(MediaFetcher(2000), name)


def test_size_and_time_are_limited(url: str) -> None:
    small = MediaFetcher(len(PICTURE) - 1, is_allowed=is_first_host)
    assert "more than the 1023 bytes" in refused(small, f"{url}/a.png")
    quick = MediaFetcher(2000, seconds=0.3, is_allowed=is_first_host)
    began = time.monotonic()
    assert "was not fetched within 0.3 s" in refused(quick, f"{url}/slow")
    assert time.monotonic() - began < 2


def test_a_server_that_answers_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quick = MediaFetcher(2000, seconds=0.2, is_allowed=is_first_host)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for scheme in ("http", "https"):
            assert "was not fetched within 0.2 s" in refused(quick, f"{scheme}://{address}/")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_certificates_are_checked(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext".split()
    names = ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = of_server.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}/a.png"
        tls = ssl.create_default_context(cafile=str(certificate))
        assert MediaFetcher(2000, is_allowed=is_first_host, tls=tls)(url) == PICTURE
        untrusted = MediaFetcher(2000, is_allowed=is_first_host)
        assert "certificate verify failed" in refused(untrusted, url)
        server.shutdown()
        thread.join()
