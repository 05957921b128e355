"""A request's options are read and checked once, whichever way it comes in."""

import json

import pytest

from dsbd_ort.batch.prompt_lines import BatchSettings, RawLine, answer_line
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.pipeline import PipelineSettings
from tests.openai_server.running_server import MODEL

CHAT = {"messages": [{"role": "user", "content": "def f("}]}
TEXT = {"prompt": "def f("}


@pytest.fixture
def built(monkeypatch):
    """The configs that were built of given options, not of another config."""
    configs = []
    build = DecodingConfig.__init__

    def counted(config, /, **options):
        build(config, **options)
        if len(options) < len(vars(config)):
            configs.append(config)

    monkeypatch.setattr(DecodingConfig, "__init__", counted)
    yield configs


@pytest.fixture(scope="module")
def server(serve):
    with serve() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", CHAT),
        ("chat/completions", {**CHAT, "max_tokens": 3, "seed": 5, "temperature": 0.0}),
        ("chat/completions", {**CHAT, "n": 3, "max_tokens": 3}),
        ("completions", {**TEXT, "best_of": 3, "max_tokens": 3}),
        ("completions", {**TEXT, "strategy": "dsbd", "num_return_sequences": 3, "max_tokens": 3}),
        ("completions", {"prompt": ["a", "bc"], "max_tokens": 3, "draft_length": 2}),
    ],
)
def test_an_http_request_builds_one_config(server, built, path, fields):
    found = server.http.post(f"/v1/{path}", json={"model": MODEL, **fields})
    assert found.status_code == 200, found.text
    assert len(built) == 1


def test_with_defaults_of_the_server_one_more_tries_them(serve, built):
    with serve(defaults={"strategy": "dsbd", "num_beams": 2, "top_k": 5, "top_p": 0.9}) as server:
        built.clear()
        body = {"model": MODEL, **CHAT, "max_tokens": 3}
        found = server.http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    assert len(built) == 2


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 3}, {"seed": 1, "drafter": "ngram"}])
def test_generate_builds_one_config(pipeline, built, options):
    pipeline.generate("def f(", **options)
    assert len(built) == 1
    list(pipeline.stream("def f(", **options))
    assert len(built) == 2


def test_a_config_is_taken_as_it_is(pipeline, built):
    config = DecodingConfig(max_new_tokens=3)
    pipeline.generate("def f(", config=config)
    assert built == [config]
    assert config.seed is None and config.draft_policy is None


def test_a_line_of_a_batch_builds_one_config(pipeline, chat_bundle, built):
    settings = BatchSettings(
        pipeline=PipelineSettings(bundle=chat_bundle), options={"max_new_tokens": 3}
    )
    line = RawLine(1, json.dumps({"prompt": "def f("}).encode())
    found = answer_line(pipeline, settings, "", line, lambda: False)
    assert found is not None and not found.is_error, found
    assert len(built) == 1


@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("costs_are_known", [True, False])
@pytest.mark.parametrize("options", [{}, {"strategy": "speculative"}, {"num_beams": 9}])
def test_a_settled_config_is_the_one_that_its_fields_build(options, costs_are_known, has_draft):
    settled = DecodingConfig(**options).settled(
        costs_are_known=costs_are_known, has_draft=has_draft
    )
    assert settled == DecodingConfig(**vars(settled))
    assert (
        settled.layer_widths
        == DecodingConfig(**options, draft_policy=settled.draft_policy).layer_widths
    )
