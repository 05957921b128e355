"""Clients that applications are written with: what they get is what the pipeline gives."""

import json

import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding.noise import sample_seed
from tests.clients.environments import program
from tests.openai_server.conftest import TOOL_TEMPLATE
from tests.openai_server.running_server import MODEL
from tests.runtime.bundle_edits import with_files

USER = {"role": "user", "content": "Hey"}
SYSTEM = {"role": "system", "content": "Be brief."}
PROMPT = "def f("
EVENTS_OF_A_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",  # several
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def pipeline(tiny_chat):
    with Pipeline.from_bundle(tiny_chat, num_threads=1) as opened:
        yield opened


@pytest.fixture
def served(recorded, tiny_chat):
    """Checks at the end that nothing was refused, and that every field is in the table."""
    with recorded(tiny_chat) as server:
        yield server
    server.check_traffic()


@pytest.fixture
def served_with_tools(recorded, demo_bundle, tmp_path):
    """The demo pair, whose chat template reads tools; see ``served``."""
    files = {"chat_template.jinja": TOOL_TEMPLATE}
    with recorded(with_files(demo_bundle, tmp_path / "tools", files)) as server:
        yield server
    server.check_traffic()


def text_of(pipeline, prompt, **options):
    if isinstance(prompt, list):
        prompt = pipeline.chat_prompt(prompt)
    options = {"strategy": "speculative", "max_new_tokens": 8, "seed": 3, **options}
    return pipeline.generate(prompt, **options).sequences[0].text


def test_openai(served, pipeline):
    found = program("openai", served.url, MODEL)
    chats = [text_of(pipeline, [USER], seed=sample_seed(3, index)) for index in range(2)]
    assert found["completion"] == text_of(pipeline, PROMPT) and found["usage"] == 8
    assert found["chat"] == chats and found["tops"] == [5] * 8
    assert found["stream"] == found["final"] == chats[0]
    assert found["streamed_calls"] == found["calls"]
    num_calls = [len(calls) for _, calls in found["calls"]]
    assert max(num_calls[:2]) > 1 and num_calls[2:] == [1, 1, 0, 0]
    assert found["model"] == MODEL
    first = text_of(pipeline, [USER])
    assert found["response"] == found["response_stream"] == first
    assert [*dict.fromkeys(found["response_events"])] == [*EVENTS_OF_A_TEXT, "response.incomplete"]
    assert json.loads(found["response_json"])["city"] in ("Rome", "Bonn")


@pytest.mark.clients
def test_openai_agents(served_with_tools):
    found = program("agents", served_with_tools.url, MODEL)
    assert found["text"] == found["deltas"] == found["stream"] and 4 <= len(found["text"]) <= 8
    assert [*dict.fromkeys(found["events"])] == [*EVENTS_OF_A_TEXT, "response.completed"]
    assert found["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    ((city, days),) = found["called"]
    assert city in ("Rome", "Bonn") and days in (1, 2, 3) and found["typed"] in ("Rome", "Bonn")


@pytest.mark.slow
def test_litellm(served, pipeline):
    found = program("litellm", served.url, MODEL)
    warm = {"temperature": 0.7, "top_p": 0.9}
    assert found["chat"] == [
        text_of(pipeline, [SYSTEM, USER], seed=sample_seed(3, index), **warm) for index in range(2)
    ]
    assert found["usage"] == 16 and found["tops"] == [3] * 8 and found["too_long"]
    served.recorder.statuses.remove(400)  # of the request that was too long
    assert found["plain"] == found["stream"] == text_of(pipeline, [SYSTEM, USER])
    assert found["text"] == text_of(pipeline, PROMPT)


@pytest.mark.clients
def test_langchain(served, pipeline):
    found = program("langchain", served.url, MODEL)
    wanted = text_of(pipeline, [SYSTEM, USER])
    assert found["chat"] == found["stream"] == wanted and found["batch"] == [wanted] * 2
    assert found["response"] == found["response_stream"] == wanted
    assert found["tops"] == [3] * 8 and found["too_long"]
    served.recorder.statuses.remove(400)  # of the request that was too long
    warm = text_of(pipeline, PROMPT, temperature=0.7)  # its default
    assert found["text"] == found["text_stream"] == warm


@pytest.mark.clients
def test_llama_index(served, pipeline):
    found = program("llama_index", served.url, MODEL)
    cool = {"temperature": 0.1}  # its default
    assert found["chat"] == found["stream"] == text_of(pipeline, [SYSTEM, USER], **cool)
    assert found["text"] == found["text_stream"] == text_of(pipeline, PROMPT, **cool)
