"""Servers that record what a client sends: over the tiny chat bundle, and over the demo pair."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.completions import CompletionBody
from dsbd_ort.openai_server.item_requests import ITEM_FIELDS, ResponsesBody
from dsbd_ort.openai_server.protocol import OPTION_NAMES
from dsbd_ort.openai_server.request_fields import FIELDS
from dsbd_runtime.bundle_files.bundle import Bundle
from tests.clients.recorder import Recorder
from tests.openai_server.conftest import CHAT_TEMPLATE
from tests.openai_server.running_server import running_server
from tests.runtime.bundle_edits import with_files

CHAT = {"chat_template.jinja": CHAT_TEMPLATE}


@dataclass(frozen=True)
class Served:
    """A server and what it was sent."""

    url: str
    recorder: Recorder

    def check_traffic(self) -> None:
        """Check that nothing was refused, and that the table or a body has every field."""
        bodies = ChatBody, CompletionBody, ResponsesBody
        declared = {*ITEM_FIELDS, *(name for body in bodies for name in body.model_fields)}
        sent = self.recorder.fields
        assert sent and sent <= {*FIELDS, *OPTION_NAMES, *declared}
        assert set(self.recorder.statuses) == {200}


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


@pytest.fixture(scope="session")
def tiny_chat(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(tiny_bundle.path, tmp_path_factory.mktemp("clients") / "tiny", CHAT)


@pytest.fixture(scope="session")
def demo_chat(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(demo_bundle, tmp_path_factory.mktemp("clients") / "demo", CHAT)
