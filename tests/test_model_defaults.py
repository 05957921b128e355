"""A model's own defaults: what generation_config.json and a top-k head do to requests."""

import json
import logging
import shutil

import pytest
from click.testing import CliRunner

from dsbd_ort import Pipeline, Service
from dsbd_ort.cli import inspect, run
from dsbd_ort.decoding import STRATEGIES, ConfigError, DecodingConfig
from dsbd_ort.requests.option_defaults import NOT_BUILT, READ, ModelDefaults, resolve
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import BundleError
from tests.runtime.bundle_edits import with_files
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
WARPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
PENALTY = {"repetition_penalty": 1.05}
ASKED = {"max_new_tokens": 8, "seed": 3, "eos_token_id": ()}


def tokens(result):
    return [sequence.token_ids for sequence in result.sequences]


@pytest.fixture
def bundle_with(tiny_bundle, tmp_path):
    """Return a bundle with this generation_config.json, text as it is."""

    def make(content):
        shutil.rmtree(tmp_path / "bundle", ignore_errors=True)
        text = content if isinstance(content, str) else json.dumps(content)
        return with_files(tiny_bundle.path, tmp_path / "bundle", {"generation_config.json": text})

    return make


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_gets_what_it_leaves_out_where_its_strategy_reads_it(
    bundle_with, tiny_bundle, strategy
):
    reads = PENALTY | ({} if STRATEGIES[strategy].rule == "search" else WARPED)
    own = {"temperature": 0.5} if "temperature" in reads else {}
    with Pipeline.from_bundle(bundle_with(QWEN)) as by_default:
        with Pipeline.from_bundle(tiny_bundle.path) as plain:
            for given in ({}, own):
                found = by_default.generate("ab", strategy=strategy, **ASKED, **given)
                wanted = plain.generate("ab", strategy=strategy, **ASKED, **{**reads, **given})
                assert tokens(found) == tokens(wanted)
        config = by_default.config({"strategy": strategy, **own})
    with Pipeline.from_bundle(bundle_with(QWEN), generation_config=False) as without:
        assert without.config({"strategy": strategy}).top_k == 0
    assert (config.temperature, config.top_k, config.top_p, config.repetition_penalty) == (
        (0.5, 20, 0.8, 1.05) if own else (1.0, 0, 1.0, 1.05)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_default_never_refuses_a_request(bundle_with, strategy):
    file = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "max_new_tokens": 10**6, "min_p": 0.1}
    with Pipeline.from_bundle(bundle_with(file)) as pipeline:
        config = pipeline.config({"strategy": strategy})
        result = pipeline.prepare([5] * 2000, {"strategy": strategy})
    does_sample = STRATEGIES[strategy].rule == "sample"
    is_cold = STRATEGIES[strategy].rule in ("joint", "joint-greedy")
    assert config.temperature == (1.0 if does_sample or not is_cold else 0.0)
    assert result.config.max_new_tokens == 48  # what the context of 2,048 has left


def test_what_the_caller_sends_counts_and_may_be_refused(bundle_with):
    with Pipeline.from_bundle(bundle_with(QWEN)) as pipeline:
        asked = {"top_k": 0, "top_p": 1, "temperature": 1, "repetition_penalty": 1, "seed": 0}
        plain = DecodingConfig(eos_token_id=pipeline.config({}).eos_token_id, seed=0)
        assert pipeline.config(asked) == plain.settled(costs_are_known=True)
        with pytest.raises(ConfigError, match="top_k is 5, which means nothing to strategy greedy"):
            pipeline.generate("ab", strategy="greedy", top_k=5)
        with Service(pipeline) as service:
            served = service.generate("ab", **ASKED)
        assert tokens(served) == tokens(pipeline.generate("ab", **ASKED))
        assert tokens(served) == tokens(pipeline.generate("ab", **ASKED, **QWEN))


def test_what_cannot_be_done_yet_is_said_once_a_bundle(bundle_with, caplog):
    file = {**QWEN, "epsilon_cutoff": 0.1}
    with caplog.at_level(logging.WARNING), Pipeline.from_bundle(bundle_with(file)) as pipeline:
        for _ in range(2):
            pipeline.generate("ab", **ASKED)
    (record,) = caplog.records
    assert "have no effect: epsilon_cutoff 0.1" in record.getMessage()


NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}


DEFAULTS = "dsbd_ort.requests.option_defaults"  # the logger


def test_values_that_ask_for_nothing_are_not_mentioned(bundle_with, caplog):
    file = {**NEUTRAL, "top_k": None, "do_sample": True, "bos_token_id": 0, "num_beams": 4}
    with caplog.at_level(logging.INFO, DEFAULTS), Pipeline.from_bundle(bundle_with(file)):
        pass
    assert not caplog.records


SEARCHED = {"length_penalty": 0.3, "early_stopping": True}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_searches_with_beams_rank_and_end_as_the_file_says(bundle_with, tiny_bundle, strategy):
    row = STRATEGIES[strategy]
    reads = SEARCHED if row.rule == "search" and row.has_beams else {}
    asked = {**ASKED, "eos_token_id": range(0, 40, 3), "strategy": strategy}
    with Pipeline.from_bundle(bundle_with({**SEARCHED, "num_beams": 2})) as by_default:
        with Pipeline.from_bundle(tiny_bundle.path) as plain:
            found, wanted = (
                by_default.generate("ab", **asked),
                plain.generate("ab", **asked, **reads),
            )
        config = by_default.config({"strategy": strategy})
    assert tokens(found) == tokens(wanted)
    ranked = (config.length_penalty, config.early_stopping)
    assert ranked == ((0.3, True) if reads else (1.0, False))
    assert config.num_beams == (4 if row.has_beams else 1)


@pytest.mark.parametrize(
    ("given", "least"),
    [({}, 17), ({"min_new_tokens": 5}, 5), ({"min_new_tokens": 0}, 0), ({"max_new_tokens": 9}, 9)],
)
def test_min_length_of_a_decoder_counts_the_prompt(bundle_with, given, least):
    with Pipeline.from_bundle(bundle_with({"min_length": 20})) as pipeline:
        assert pipeline.prepare([5] * 3, given).config.min_new_tokens == least
        assert pipeline.prepare([5] * 30, {}).config.min_new_tokens == 0
    with Pipeline.from_bundle(bundle_with({"min_length": 20, "min_new_tokens": 2})) as pipeline:
        assert pipeline.prepare([5] * 3, {}).config.min_new_tokens == 2


ELSEWHERE = {  # fields of transformers that no request reads and that no warning names
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),  # the manifest's
    *("do_sample", "min_length"),  # the strategy decides; see above
    # the type of results, and the origin of the file
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("return_dict_in_generate", "transformers_version", "_from_model_config"),
    # caches, compilation and drafts: they change the speed, not the output
    *("cache_config", "cache_implementation", "max_cache_len", "prefill_chunk_size", "use_cache"),
    *("compile_config", "continuous_batching_config", "disable_compile", "low_memory"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
    *("assistant_lookbehind", "is_assistant", "max_matching_ngram_size", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "speculation_type"),
    *("target_lookbehind", "use_mtp"),
}


def test_every_field_of_transformers_is_read_or_named():
    fields = vars(pytest.importorskip("transformers").GenerationConfig()).keys()
    assert fields - {*READ, *NOT_BUILT} == ELSEWHERE


def test_fields_that_no_request_reads_are_named_unless_they_change_nothing(bundle_with, caplog):
    neutral = {name: values[-1] for name, values in NOT_BUILT.items()}
    with caplog.at_level(logging.INFO, DEFAULTS), Pipeline.from_bundle(bundle_with(neutral)):
        assert not caplog.records
    other = dict.fromkeys(NOT_BUILT, 7)
    with caplog.at_level(logging.WARNING), Pipeline.from_bundle(bundle_with(other)):
        (record,) = caplog.records
    assert all(f"{name} 7" in record.getMessage() for name in NOT_BUILT)
    assert {"forced_eos_token_id", "guidance_scale", "num_beam_groups", "penalty_alpha"} < {
        *NOT_BUILT
    }


MALFORMED = [
    ("{", "cannot be read as JSON"),
    ("[" * 100_000, "cannot be read as JSON"),
    ([1], "expected a JSON object"),
    ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
    ('{"temperature": NaN}', "temperature is nan"),
    ({"top_p": 0}, "top_p is 0; expected a number more than 0"),
    ({"top_k": -2}, "top_k is -2; expected at least 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5; expected a whole number"),
    ({"min_length": 1.5}, "min_length is 1.5; expected a whole number"),
    ({"length_penalty": "x"}, "length_penalty is 'x'; expected a number"),
]


@pytest.mark.parametrize(("content", "words"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_named_at_opening(bundle_with, content, words):
    folder = bundle_with(content)
    with pytest.raises(BundleError, match=r"generation_config\.json") as caught:
        Pipeline.from_bundle(folder)
    assert words in str(caught.value)
    done = CliRunner().invoke(run, [str(folder), "--prompt", "x"])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    Pipeline.from_bundle(folder, generation_config=False).close()


def test_inspect_shows_the_defaults_and_who_does_not_read_them(bundle_with):
    file = {**QWEN, "max_new_tokens": 99, "eta_cutoff": 0.2, **SEARCHED, "min_length": 9}
    folder = str(bundle_with(file))
    text = CliRunner().invoke(inspect, [folder]).stdout
    listed = "temperature 0.7, top_k 20, top_p 0.8, max_new_tokens 99, repetition_penalty 1.05"
    ranked = "length_penalty 0.3, early_stopping True"
    assert f"defaults of generation_config.json: {ranked}, {listed}, min_length 9" in text
    assert "not read by search strategies: temperature, top_k, top_p" in text
    assert "read only by searches with several beams: length_penalty, early_stopping" in text
    assert "dsbd-ort cannot do yet: eta_cutoff 0.2" in text
    summary = json.loads(CliRunner().invoke(inspect, [folder, "--json"]).stdout)
    del file["eta_cutoff"]
    assert summary["generation_config"] == file
    assert summary["not_built"] == {"eta_cutoff": 0.2}


def test_the_command_takes_the_file_or_leaves_it(bundle_with):
    folder = str(bundle_with({"max_new_tokens": 3}))
    for flags in ([], ["--no-generation-config"]):
        done = CliRunner().invoke(
            run, [folder, "--prompt", "x", "--strategy", "greedy", "--json", *flags]
        )
        (sequence,) = json.loads(done.stdout)["sequences"]
        assert sequence["finish_reason"] == "length"
        assert (len(sequence["token_ids"]) == 3) == (not flags)


@pytest.fixture(scope="module")
def topk_bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topk") / "bundle"
    topk = TinyModel(logits="topk:16", full_logits=False)
    return write_tiny_bundle(folder, target=topk, draft=TinyModel(logits="topk:8", seed=1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_engines_with_a_top_k_head_take_default_requests(topk_bundle, strategy, caplog):
    is_search = STRATEGIES[strategy].rule == "search"
    with caplog.at_level(logging.WARNING), Pipeline.from_bundle(topk_bundle) as pipeline:
        for _ in range(2):
            found = pipeline.generate("ab", strategy=strategy, **ASKED)
        assert len(caplog.records) == (0 if is_search else 1)
        top_k = {} if is_search else {"top_k": 16}
        same = pipeline.generate("ab", strategy=strategy, **ASKED, **top_k)
        assert tokens(found) == tokens(same)
        if not is_search:
            assert "top_k is 16, as many logits as the engine returns" in caplog.text
            with pytest.raises(ConfigError, match="top_k is 0"):
                pipeline.generate("ab", strategy=strategy, top_k=0)


@pytest.mark.parametrize(
    ("in_file", "top_k", "is_told"), [(5, 5, False), (16, 16, False), (20, 16, True)]
)
def test_a_top_k_of_the_file_is_lowered_to_what_the_engine_returns(
    topk_bundle, in_file, top_k, is_told, caplog
):
    defaults = ModelDefaults.from_bundle(open_bundle(topk_bundle))
    defaults.options["top_k"] = in_file
    with caplog.at_level(logging.WARNING):
        assert resolve({}, defaults).top_k == top_k
    assert ("generation_config.json says 20" in caplog.text) == is_told
    assert resolve({"strategy": "beam-search"}, defaults).top_k == 0


USUAL = (1.0, 0, 1.0, 64)  # the table's
CHATS = [
    # (generation_config.json, given, temperature, top_k, top_p, max_new_tokens)
    ({}, {}, (0.7, 0, 0.9, 2048)),
    ({}, {"temperature": 0.2}, (0.2, 0, 0.9, 2048)),
    ({}, {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64}, USUAL),
    ({}, {"strategy": "greedy"}, (1.0, 0, 1.0, 2048)),
    ({}, {"temperature": 0.0}, (1.0, 0, 1.0, 2048)),  # a search, which reads neither
    ({"top_k": 20}, {}, (1.0, 20, 1.0, 2048)),  # the model says how it is sampled
    ({"repetition_penalty": 1.1, "max_new_tokens": 99}, {}, (0.7, 0, 0.9, 99)),
    ({"max_new_tokens": 9999}, {}, (0.7, 0, 0.9, 9999)),
]


@pytest.mark.parametrize(("file", "given", "expected"), CHATS)
def test_chats_get_what_neither_caller_nor_model_says(bundle_with, file, given, expected):
    with Pipeline.from_bundle(bundle_with(file), chat_defaults=True) as pipeline:
        config = pipeline.config(given)
        found = config.temperature, config.top_k, config.top_p, config.max_new_tokens
        assert found == expected
        if "max_new_tokens" not in given:
            asked = pipeline.prepare([5] * 2000, given).config
            assert asked.max_new_tokens == 48  # what the context of 2,048 has left
    with Pipeline.from_bundle(bundle_with(file)) as plain:
        config = plain.config({})
        assert config.max_new_tokens == file.get("max_new_tokens", 64)
        assert (config.temperature, config.top_p) == (1.0, 1.0)


def test_how_a_chat_is_sampled_is_said_once_where_it_is(tiny_bundle, caplog):
    with Pipeline.from_bundle(tiny_bundle.path, chat_defaults=True) as pipeline:
        for given in ({"strategy": "greedy"}, {"temperature": 0.5, "top_p": 1.0}):
            pipeline.config(given)
        assert not caplog.records
        for given in ({"temperature": 0.5}, {}):
            pipeline.config(given)
    (record,) = caplog.records
    assert record.getMessage() == (
        "no generation_config.json says how to sample this chat: top_p 0.9; give them to choose, "
        "or --no-chat-defaults"
    )
