"""Servers over the tiny bundle, and the pipeline whose tokens theirs must be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_runtime.bundle import Bundle, open_bundle, write_manifest
from tests.openai_server.running_server import RunningServer, running_server

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if think is defined and think %}<think>{% endif %}"
)
Serve = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def chat_bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_bundle.path, folder)
    manifest = open_bundle(folder).manifest
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_manifest(folder, versions=manifest.versions, target=manifest.target, draft=manifest.draft)
    return folder


@pytest.fixture(scope="session")
def pipeline(chat_bundle: Path) -> Iterator[Pipeline]:
    """What a lone request gets."""
    with Pipeline.from_bundle(chat_bundle, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def serve(chat_bundle: Path) -> Serve:
    """Start a server of one's own: its limits, and those of its service."""

    @contextmanager
    def started(
        limits: ServiceLimits | None = None, bundle: Path = chat_bundle, **settings: Any
    ) -> Iterator[RunningServer]:
        with (
            Pipeline.from_bundle(bundle, num_threads=1) as opened,
            Service(opened, limits) as service,
            running_server(service, **settings) as server,
        ):
            yield server

    return started


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[RunningServer]:
    """A server with the usual limits, shared; its requests draw beams, as ``generate`` does."""
    with serve(defaults={"strategy": "dsbd"}) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the shared server."""
    with server.client() as opened:
        yield opened
