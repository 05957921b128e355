"""Servers that record what a client sends: over the tiny chat bundle, and over the demo pair."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle, write_manifest
from tests.clients.recorder import Recorder
from tests.openai_server.conftest import CHAT_TEMPLATE
from tests.openai_server.running_server import running_server


@dataclass(frozen=True)
class Served:
    """A server and what it was sent."""

    url: str
    recorder: Recorder


Serve = Callable[[Path], AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def recorded() -> Serve:
    """Serve a bundle and record the requests."""

    @contextmanager
    def served(bundle: Path) -> Iterator[Served]:
        recorder = Recorder()
        with (
            Pipeline.from_bundle(bundle, num_threads=1) as pipeline,
            Service(pipeline) as service,
            running_server(service, around=recorder.around) as server,
        ):
            yield Served(server.url, recorder)

    return served


def with_chat_template(bundle: Path, folder: Path) -> Path:
    """Return a copy of a bundle that has a chat template."""
    shutil.copytree(bundle, folder)
    manifest = open_bundle(folder).manifest
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_manifest(folder, versions=manifest.versions, target=manifest.target, draft=manifest.draft)
    return folder


@pytest.fixture(scope="session")
def tiny_chat(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle.path, tmp_path_factory.mktemp("clients") / "tiny")


@pytest.fixture(scope="session")
def demo_chat(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(demo_bundle, tmp_path_factory.mktemp("clients") / "demo")
