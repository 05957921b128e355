"""Servers over the tiny bundle, and the pipeline whose tokens theirs must be."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import ServiceLimits
from dsbd_runtime.bundle_files.bundle import Bundle
from tests.openai_server.running_server import MODEL, RunningServer, served_bundle
from tests.runtime.bundle_edits import with_files

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if think is defined and think %}<think>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
Serve = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def chat_bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    return with_files(tiny_bundle.path, folder, {"chat_template.jinja": CHAT_TEMPLATE})


@pytest.fixture(scope="session")
def tool_bundle(chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a chat template that reads tools and calls."""
    folder = tmp_path_factory.mktemp("tools") / "tiny"
    return with_files(chat_bundle, folder, {"chat_template.jinja": TOOL_TEMPLATE})


@pytest.fixture(scope="module")
def own_client(serve: Serve) -> Iterator[openai.OpenAI]:
    """Of a server that does not tell its model of tools, as its template has none."""
    with serve(tool_template="own") as server, server.client() as client:
        yield client


def num_prompt_tokens(client: openai.OpenAI, messages: Any, **fields: Any) -> int:
    """Return the length of a chat's prompt, in the tiny bundle's tokens: letters."""
    fields = {"max_tokens": 4, **fields}
    answer = client.chat.completions.create(model=MODEL, messages=messages, **fields)
    return answer.usage.prompt_tokens


@pytest.fixture(scope="session")
def pipeline(chat_bundle: Path) -> Iterator[Pipeline]:
    """Answer to a single request."""
    with Pipeline.from_bundle(chat_bundle, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def serve(chat_bundle: Path) -> Serve:
    """Start a server of one's own: its limits, and those of its service."""

    def started(
        limits: ServiceLimits | None = None, bundle: Path = chat_bundle, **settings: Any
    ) -> AbstractContextManager[RunningServer]:
        return served_bundle(bundle, limits, **settings)

    return started


@pytest.fixture(scope="module")
def tool_server(serve: Serve, tool_bundle: Path) -> Iterator[RunningServer]:
    """A server whose template reads tools and calls."""
    with serve(bundle=tool_bundle) as running:
        yield running


@pytest.fixture(scope="module")
def tool_client(tool_server: RunningServer) -> Iterator[openai.OpenAI]:
    with tool_server.client() as client:
        yield client


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
