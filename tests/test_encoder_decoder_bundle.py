"""Bundles of encoder-decoders: what transformers generates, drafted or not, alone or together."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

import dsbd_ort
from dsbd_ort.cli import inspect
from dsbd_ort.decoding import DecodingError, DecodingRequest, result_of
from dsbd_ort.decoding.whole_requests import decode_iterations
from dsbd_runtime.errors import BundleError, CapacityError, InputError, ProviderError
from scripts.family_checkpoints import SOURCE_READERS
from tests.encoder_decoder_pair import (
    DEFAULTS,
    NO_DEFAULTS,
    exported,
    generated,
    some_sources,
    with_defaults,
)
from tests.runtime.bundle_edits import edited


def check_equal(pipe, folder, source, **options):
    ours = ("strategy", "draft_length")
    of_transformers = {name: value for name, value in options.items() if name not in ours}
    wanted, scores = generated(folder, source, **of_transformers)
    found = pipe.generate(source=source, **options).sequences
    if scores is None:
        assert [each.token_ids for each in found] == wanted
        return
    found_scores = np.array([each.score for each in found])
    assert np.allclose(found_scores, scores, atol=1e-4)
    # of two candidates that differ by rounding alone either may be the last that is kept
    is_tie = np.abs(found_scores - scores) < 1e-7
    for each, row, may_differ in zip(found, wanted, is_tie & (len(found) > 1), strict=True):
        assert each.token_ids == row or (may_differ and each is found[-1])


SEARCHES = [
    {},
    {"strategy": "speculative-beam-search", "draft_length": 3},
    {"strategy": "beam-search", "num_beams": 3},
    {"num_return_sequences": 4},
    {"num_beams": 1},
    {"num_beams": 5, "early_stopping": False, "length_penalty": 2.0, "num_return_sequences": 5},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2, "num_return_sequences": 4},
]


def test_the_defaults_and_searches_of_the_model(source_pipe, source_pair):
    for index, source in enumerate(some_sources(10)):
        for options in SEARCHES if index < 2 else SEARCHES[:1]:
            check_equal(source_pipe, source_pair / "marian", source, **options)
    stats = source_pipe.generate(source=source, draft_length=3).stats
    assert stats.num_draft_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCE_READERS)
@pytest.mark.parametrize("defaults", [DEFAULTS, NO_DEFAULTS])
def test_two_hundred_sources_of_every_family(name, defaults, captures, tmp_path):
    exported(name, None, captures, tmp_path, partial(with_defaults, defaults=defaults))
    with dsbd_ort.Pipeline.from_bundle(tmp_path / "bundle", num_threads=2) as pipe:
        for index, source in enumerate(some_sources(200)):
            options = SEARCHES[index % len(SEARCHES)]
            if options and defaults is NO_DEFAULTS:  # of transformers: one beam
                options = {"num_beams": 4, **options}
            check_equal(pipe, tmp_path / name, source, **options)


SAMPLING = [
    ("beam-sample", "dsbd", {"num_beams": 3, "num_return_sequences": 3}),
    ("sample", "speculative", {"temperature": 0.8}),
]


def test_memory_of_sources_is_counted_and_given_back(source_pipe):
    short, long = [5, 1], [5] * 255 + [1]
    results = [
        source_pipe.generate(source=source, draft_length=2) for source in (short, long, short)
    ]
    peaks = [result.stats.kv_bytes_peak for result in results]
    target, draft = 3 * 2 * 4 * 8 * 4, 3 * 2 * 4 * 8 * 4  # bytes of one token of a source
    assert peaks[1] - peaks[0] >= (len(long) - len(short)) * (target + draft) * 0.9
    assert peaks[2] < peaks[1]


REFUSED = [  # (prompt, options, error, its words)
    ([], {}, DecodingError, "the source has no token"),
    (
        [5] * 257,
        {},
        CapacityError,
        "this model's maximum context length is 256 tokens of a source, the source has 257",
    ),
    ([300], {}, DecodingError, "the source has token id 300; expected 0 to 299"),
    ([5], {"prompt_logprobs": True}, InputError, "the prompt of an encoder-decoder is its source"),
    ([5], {"max_new_tokens": 256}, CapacityError, "max_new_tokens 255"),
    ("hello", {"source": "hello"}, InputError, "prompt and source: both"),
    (None, {}, InputError, "prompt and source: neither"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "words"), REFUSED)
def test_invalid_requests_are_refused(prompt, options, error, words, source_pipe):
    with pytest.raises(error, match=words):
        source_pipe.generate(prompt, **options)


def test_what_an_encoder_decoder_has_not(source_pipe, source_pair):
    with pytest.raises(InputError, match="has no chats"):
        source_pipe.chat_prompt([{"role": "user", "content": "hello"}])
    with pytest.raises(InputError, match="has no tokens for languages"):
        source_pipe.translate("hello", tgt_lang="fra_Latn")

    with pytest.raises(ProviderError, match="engine of an encoder-decoder, which provider 'cuda'"):
        dsbd_ort.Pipeline.from_bundle(source_pair / "bundle", provider="cuda")


def test_a_source_of_a_decoder_is_refused(demo_bundle):
    with dsbd_ort.Pipeline.from_bundle(demo_bundle) as pipe:
        with pytest.raises(InputError, match="is not an encoder-decoder; give it as the prompt"):
            pipe.generate(source="hello")
        with pytest.raises(InputError, match="is not an encoder-decoder, which translate needs"):
            pipe.translate("hello")


def test_decoding_without_a_source_is_refused(source_pipe):
    with source_pipe.models.engines() as (target, _):
        with pytest.raises(DecodingError, match="source is None, but the target is an encoder"):
            dsbd_ort.decoding.decode(
                target,
                None,
                [2],
                dsbd_ort.DecodingConfig(strategy="greedy"),
                np.random.default_rng(0),
            )


def test_n_grams_of_a_source_without_tokens_are_refused(source_pipe):
    config = dsbd_ort.DecodingConfig(strategy="greedy", encoder_no_repeat_ngram_size=2)
    request = DecodingRequest(
        prompt_ids=[2], config=config, rng=np.random.default_rng(0), source="a sound"
    )
    with source_pipe.models.engines() as (target, _):
        with pytest.raises(DecodingError, match="encoder_no_repeat_ngram_size is 2, but the sour"):
            result_of(decode_iterations(request, target, None))


def of_encoder(**fields):
    return lambda data: data["target"]["encoder"].update(fields)


DAMAGED = [  # (edit of the manifest, words)
    (of_encoder(start_token_id=300), "encoder: start_token_id is 300, expected 0 to 299"),
    (of_encoder(languages={"eng_Latn": -1}), "encoder: eng_Latn is -1, expected 0 to 299"),
    (of_encoder(context_length=0), "encoder: context_length is 0, expected a number above 0"),
    (of_encoder(cross=[]), "encoder: cross is [], expected increasing layers from 0 to 2"),
    (of_encoder(windows=3), "encoder has windows 3, which this version of dsbd-ort does not know"),
    (of_encoder(reads_positions=True), "lacks the input row_positions"),
    (lambda data: data["target"]["encoder"]["cross"][1].update(key_width=16), "cross.1.key of sha"),
    (lambda data: data["files"].pop("target/encoder.onnx"), "lists no target/encoder.onnx"),
    (
        lambda data: data["target"].update(encoder=None),
        "reads a source, which requests to its target do not",
    ),
]


@pytest.mark.parametrize(("edit", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_a_manifest_that_contradicts_itself_or_its_graphs(edit, words, source_pair, tmp_path):
    copy = shutil.copytree(source_pair / "bundle", tmp_path / "bundle")
    with pytest.raises(BundleError, match=re.escape(words)):
        dsbd_ort.Pipeline.from_bundle(edited(copy, edit))


def test_what_an_inspection_says(source_pair):
    done = CliRunner().invoke(inspect, [str(source_pair / "bundle")])
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any("source │ 256 tokens of 300 │ 256 tokens of 300" in line for line in lines), lines
    assert any("bytes a source token │ 768 │ 768" in line for line in lines)
    content = json.loads(
        CliRunner().invoke(inspect, [str(source_pair / "bundle"), "--json"]).stdout
    )
    assert content["target"]["encoder"]["start_token_id"] == 2
    cuda = next(each for each in content["providers"] if each["name"] == "cuda")
    assert any("engine of an encoder-decoder" in problem for problem in cuda["problems"])
