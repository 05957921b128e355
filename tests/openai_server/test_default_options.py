"""Options that a request leaves out: the server's, the model's own, those of the table."""

import json

import pytest

from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.requests.option_defaults import ModelDefaults, ServerDefaults, with_server
from tests.openai_server.running_server import MODEL
from tests.runtime.bundle_edits import with_files

PROMPT = "def f("
GIVEN = {"strategy": "dsbd", "num_beams": 2, "top_k": 5, "temperature": 0.7, "draft_length": 2}


def filled_by(server, options):
    return with_server(options, server, ModelDefaults())


def answer(server, **fields):
    body = {"model": MODEL, "prompt": PROMPT, "seed": 3, **fields}
    found = server.http.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()


FILLED = [  # (options of the request, what is filled in of GIVEN)
    ({}, GIVEN),
    ({"num_beams": 3}, {**GIVEN, "num_beams": 3}),
    ({"strategy": "sample"}, {"strategy": "sample", "top_k": 5, "temperature": 0.7}),
    ({"strategy": "speculative"}, {**GIVEN, "strategy": "speculative", "num_beams": None}),
    ({"strategy": "beam-search"}, {"strategy": "beam-search", "num_beams": 2}),
    ({"strategy": "greedy"}, {"strategy": "greedy"}),
    (
        {"temperature": 0.0},
        {"strategy": "speculative-beam-search", "num_beams": 2, "draft_length": 2},
    ),
    ({"draft_beams": (3, 2, 3, 3)}, {**GIVEN, "draft_length": None}),  # four layers are not two
    ({"temperature": 2.0}, {**GIVEN, "temperature": 2.0}),
]


@pytest.mark.parametrize(("options", "filled"), FILLED)
def test_what_a_request_leaves_out_is_filled_in_where_it_is_read(options, filled):
    found = filled_by(ServerDefaults(GIVEN), options)
    assert found == {**{n: v for n, v in filled.items() if v is not None}, **options}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_defaults_never_make_a_request_of_any_strategy_fail(strategy):
    given = {
        **GIVEN,
        "width_policy": "threshold",
        "accept_threshold": 0.5,
        "min_beams": 2,
        "top_p": 0.8,
        "length_penalty": 0.5,
        "seed": 4,
        "stop_strings": ("x",),
        "eos_token_id": (1,),
    }
    filled = filled_by(ServerDefaults(given), {"strategy": strategy})
    config = DecodingConfig(**filled)
    assert config.seed == 4 and config.length_penalty == 0.5 and config.stop_strings == ("x",)
    assert (config.top_p == 0.8) == (STRATEGIES[strategy].rule != "search")
    assert (config.min_beams == 2) == (strategy == "dsbd")


@pytest.mark.parametrize(
    ("temperature", "strategy"), [(None, "speculative"), (0, "speculative-beam-search")]
)
def test_without_options_one_beam_answers_unless_more_are_asked_for(temperature, strategy):
    options = {} if temperature is None else {"temperature": temperature}
    filled = filled_by(ServerDefaults({}), options)
    config = DecodingConfig(**filled)
    assert (config.strategy, config.num_beams) == (strategy, 1)
    beams = filled_by(ServerDefaults({}), {**options, "num_beams": 3})
    found = DecodingConfig(**beams)
    assert found.num_beams == 3 and found.row.has_draft
    assert (found.row.rule == "search") == (temperature == 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "num_beams is 4, which means nothing to strategy speculative"),
        ({"strategy": "no-such"}, "no-such"),
        ({"strategy": "beam-search", "temperature": 0.5}, "temperature"),
    ],
)
def test_defaults_that_contradict_each_other_are_refused_at_the_start(given, message):
    with pytest.raises(ConfigError, match=message):
        ServerDefaults(given)


def test_requests_get_the_defaults_of_the_server(serve, pipeline):
    with serve(defaults={**GIVEN, "stop_strings": "zz"}) as server:
        for fields in ({}, {"num_beams": 3}, {"strategy": "sample"}, {"strategy": "greedy"}):
            found = answer(server, max_tokens=9, **fields)
            read = filled_by(ServerDefaults(GIVEN), fields)
            wanted = pipeline.generate(PROMPT, max_new_tokens=9, seed=3, stop_strings="zz", **read)
            assert found["choices"][0]["text"] == wanted.sequences[0].text
            assert found["dsbd"]["strategy"] == read["strategy"]
        beams = answer(server, max_tokens=4, n=3, use_beam_search=True)  # more than the server's
        assert len({choice["text"] for choice in beams["choices"]}) == 3


@pytest.mark.parametrize(
    ("limit", "of_model", "fields", "num_tokens"),
    [
        (None, None, {}, 2048 - 6),
        (None, None, {"strategy": "sample"}, 2048 - 6),
        (40, None, {}, 40),
        (None, 30, {}, 30),
        (20, 30, {}, 20),
        (None, 30, {"max_tokens": 33}, 33),
    ],
)
def test_answers_are_as_long_as_the_context_allows_unless_told(
    serve, chat_bundle, tmp_path, limit, of_model, fields, num_tokens
):
    bundle = chat_bundle
    if of_model:
        text = json.dumps({"max_new_tokens": of_model})
        bundle = with_files(chat_bundle, tmp_path / "bundle", {"generation_config.json": text})
    with serve(bundle=bundle, max_new_tokens=limit) as server:
        found = answer(server, ignore_eos=True, **fields)
    assert found["usage"]["prompt_tokens"] == 6
    assert found["usage"]["completion_tokens"] == num_tokens
    assert found["choices"][0]["finish_reason"] == "length"
