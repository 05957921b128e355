"""dsbd-serve before it serves: what it refuses and warns about, and that its page is whole."""

import re
import socket
from pathlib import Path

import pytest

from dsbd_ort.cli import serve
from dsbd_ort.commands.http_server import is_loopback
from dsbd_ort.openai_server.metrics import Metrics
from dsbd_ort.pipeline import Pipeline
from tests.commands.calls import called, called_apart
from tests.openai_server.fakes import ScriptedService

PAGE = Path(__file__).parents[2] / "docs" / "serving_reference.md"


def error_of(*arguments):
    done = called(serve, *arguments)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    return done.stderr


def test_errors_are_one_line(tiny_bundle, tmp_path):
    assert "nowhere" in error_of(tmp_path / "nowhere", "--port", 0)
    keys = tmp_path / "keys"
    assert "cannot be read" in error_of(tiny_bundle.path, "--api-key-file", keys)
    assert "--host" in error_of(tiny_bundle.path, "--host", "no.such.host.invalid")
    assert "kv_bytes is 5" in error_of(tiny_bundle.path, "--port", 0, "--kv-bytes", 5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in error_of(tiny_bundle.path, "--port", port)


def test_a_missing_package_is_named_with_its_mend(tiny_bundle):
    before = "import sys; sys.modules['fastapi'] = None"
    done = called_apart("serve", tiny_bundle.path, before=before)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "(fastapi); in a checkout of dsbd-ort run: pip install -c constraints.txt -e '.[serve]'\n"
    )


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("example.org", False),
    ],
)
def test_which_hosts_others_can_reach(host, is_own):
    assert is_loopback(host) is is_own


def test_the_page_shows_every_option():
    options = {option for parameter in serve.params for option in parameter.opts} - {"bundle"}
    shown = set(re.findall(r"`(--[a-z-]+)(?: NAME=FILE)?`", PAGE.read_text()))
    assert options - {"--version", "--debug", "--help-all"} <= shown


def test_the_page_shows_every_metric(tiny_bundle):
    with Pipeline.from_bundle(tiny_bundle.path) as pipeline:
        metrics = Metrics(ScriptedService(pipeline, lambda: iter(())), "tiny", lambda: 0.0)
        names = {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in metrics.registry.collect()
        }
    assert names == set(re.findall(r"`((?:vllm|dsbd):\w+)`", PAGE.read_text()))
