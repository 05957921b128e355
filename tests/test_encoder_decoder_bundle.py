"""Bundles of encoder-decoders: what transformers generates, drafted or not, alone or together."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import dsbd_ort
from dsbd_ort.cli import inspect
from dsbd_ort.decoding import DecodingError, DecodingRequest, result_of
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, decoded_together
from dsbd_ort.decoding.decode import decode_iterations
from dsbd_ort.decoding.kv_cache import PrefixCache
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import BundleError, CapacityError, InputError, ProviderError
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.ort_encoder import OrtEncoder
from scripts.family_checkpoints import SOURCE_READERS
from tests.encoder_decoder_pair import (
    DEFAULTS,
    NO_DEFAULTS,
    exported,
    generated,
    some_sources,
)
from tests.ort_sessions import cpu_session
from tests.runtime.bundle_edits import edited


@pytest.fixture(scope="session")
def pipe(source_pair):
    with dsbd_ort.Pipeline.from_bundle(source_pair / "bundle", num_threads=1) as opened:
        yield opened


def check_equal(pipe, folder: Path, source: list[int], **options: Any) -> None:
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


def test_the_defaults_and_searches_of_the_model(pipe, source_pair):
    for index, source in enumerate(some_sources(10)):
        for options in SEARCHES if index < 2 else SEARCHES[:1]:
            check_equal(pipe, source_pair / "marian", source, **options)
    stats = pipe.generate(source=source, draft_length=3).stats
    assert stats.num_draft_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCE_READERS)
@pytest.mark.parametrize("defaults", [DEFAULTS, NO_DEFAULTS])
def test_two_hundred_sources_of_every_family(name, defaults, captures, tmp_path):
    exported(name, None, captures, tmp_path, defaults)
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


def test_equal_targets_of_other_sources_share_nothing(pipe):
    """Both begin with the same two tokens, whose rows depend on the source."""
    first, second = some_sources(2)
    alone = [pipe.generate(source=source).sequences[0] for source in (first, second)]
    assert alone[0].token_ids[0] == alone[1].token_ids[0] == 7
    assert alone[0].token_ids != alone[1].token_ids
    for _ in range(2):
        together = pipe.generate([first, second, first])
        wanted = [alone[0], alone[1], alone[0]]
        for result, sequence in zip(together, wanted, strict=True):
            assert result.sequences[0].token_ids == sequence.token_ids
            assert result.sequences[0].logprob == pytest.approx(sequence.logprob, abs=1e-4)


def test_equal_prompts_of_other_sources_share_no_rows(pipe):
    """Together, one after the other, and with rows that an earlier request has left."""
    prompt = [2, 7, 50, 60, 70]
    config = dsbd_ort.DecodingConfig(strategy="beam-search", num_beams=2, max_new_tokens=6)

    def request(source: tuple[int, ...]) -> DecodingRequest:
        rng = np.random.default_rng(0)
        return DecodingRequest(prompt_ids=prompt, config=config, rng=rng, source=source)

    first, second = (tuple(source) for source in some_sources(2))
    with pipe.engines() as (target, _):
        alone = []
        for source in (first, second):
            target.keep(np.arange(0))
            result = result_of(decode_iterations(request(source), target, None, None))
            alone.append(result.sequences[0])
        assert alone[0].logprob != pytest.approx(alone[1].logprob, abs=1e-2)
        target.keep(np.arange(0))
        prefixes = PrefixCache(), PrefixCache()
        for source in (first, second, second, first):
            result = result_of(decode_iterations(request(source), target, None, prefixes))
            wanted = alone[0 if source == first else 1]
            assert result.sequences[0].logprob == pytest.approx(wanted.logprob, abs=1e-4)
        target.keep(np.arange(0))
        together = decoded_together(
            BatchedDecoder(target, None), [request(s) for s in (first, second, first)], 3
        )
        for result, wanted in zip(together, (alone[0], alone[1], alone[0]), strict=True):
            assert result.sequences[0].logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_rows_of_sources_are_bounded_and_read_again(source_pair):
    entry = open_bundle(source_pair / "bundle").entry("target").encoder
    ort = import_ort()
    path = source_pair / "bundle" / "target" / "encoder.onnx"
    encoder = OrtEncoder(ort, path, entry, cpu_session, 4_000)
    one, other = (5, 6, 1), (7, 8, 9, 1)
    first = encoder.cross_rows(one)
    assert encoder.cross_rows(one) is first
    assert encoder.num_bytes == first.num_bytes == 768 * len(one)
    second = encoder.cross_rows(other)  # both together are more than may be kept
    assert encoder.num_bytes == second.num_bytes == 768 * len(other)
    again = encoder.cross_rows(one)
    assert again is not first
    for name, value in again.values.items():
        assert np.array_equal(value.numpy(), first.values[name].numpy())
    encoder.forget()
    assert encoder.num_bytes == 0


def test_memory_of_sources_is_counted_and_given_back(pipe):
    short, long = [5, 1], [5] * 255 + [1]
    results = [pipe.generate(source=source, draft_length=2) for source in (short, long, short)]
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
        "the source has 257 tokens, the encoder of this bundle reads 256",
    ),
    ([300], {}, DecodingError, "the source has token id 300; expected 0 to 299"),
    ([5], {"prompt_logprobs": True}, InputError, "the prompt of an encoder-decoder is its source"),
    ([5], {"max_new_tokens": 256}, CapacityError, "max_new_tokens 255"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "words"), REFUSED)
def test_invalid_requests_are_refused(prompt, options, error, words, pipe):
    with pytest.raises(error, match=words):
        pipe.generate(prompt, **options)


def test_what_an_encoder_decoder_has_not(pipe):
    with pytest.raises(InputError, match="has no chats"):
        pipe.chat_prompt([{"role": "user", "content": "hello"}])
    with pytest.raises(InputError, match="has no tokens for languages"):
        pipe.translate("hello", tgt_lang="fra_Latn")
    with pytest.raises(InputError, match="prompt and source: both"):
        pipe.generate("hello", source="hello")
    with pytest.raises(InputError, match="prompt and source: neither"):
        pipe.generate()


def test_a_gpu_is_refused(source_pair):
    with pytest.raises(ProviderError, match="engine of an encoder-decoder, which provider 'cuda'"):
        dsbd_ort.Pipeline.from_bundle(source_pair / "bundle", provider="cuda")


def test_a_source_of_a_decoder_is_refused(demo_bundle):
    with dsbd_ort.Pipeline.from_bundle(demo_bundle) as pipe:
        with pytest.raises(InputError, match="is not an encoder-decoder; give it as the prompt"):
            pipe.generate(source="hello")
        with pytest.raises(InputError, match="is not an encoder-decoder, which translate needs"):
            pipe.translate("hello")


def test_decoding_without_a_source_is_refused(pipe):
    with pipe.engines() as (target, _):
        with pytest.raises(DecodingError, match="source is None, but the target is an encoder"):
            dsbd_ort.decoding.decode(
                target,
                None,
                [2],
                dsbd_ort.DecodingConfig(strategy="greedy"),
                np.random.default_rng(0),
            )


def test_n_grams_of_a_source_without_tokens_are_refused(pipe):
    config = dsbd_ort.DecodingConfig(strategy="greedy", encoder_no_repeat_ngram_size=2)
    request = DecodingRequest(
        prompt_ids=[2], config=config, rng=np.random.default_rng(0), source="a sound"
    )
    with pipe.engines() as (target, _):
        with pytest.raises(DecodingError, match="encoder_no_repeat_ngram_size is 2, but the sour"):
            result_of(decode_iterations(request, target, None, None))


def changed(source_pair: Path, folder: Path, edit) -> Path:
    """A copy of the bundle whose manifest was edited."""
    shutil.copytree(source_pair / "bundle", folder / "bundle")
    return edited(folder / "bundle", edit)


DAMAGED = [  # (field of the target's encoder, value, words)
    ("start_token_id", 300, "encoder: start_token_id is 300, expected 0 to 299"),
    ("languages", {"eng_Latn": -1}, "encoder: eng_Latn is -1, expected 0 to 299"),
    ("context_length", 0, "encoder: context_length is 0, expected a number above 0"),
    ("cross", [], "encoder: cross is [], expected increasing layers from 0 to 2"),
    ("windows", 3, "encoder has windows 3, which this version of dsbd-ort does not know"),
    ("reads_positions", True, "lacks the input row_positions"),
]


@pytest.mark.parametrize(("field", "value", "words"), DAMAGED)
def test_a_manifest_that_contradicts_itself_or_its_graphs(
    field, value, words, source_pair, tmp_path
):
    def edit(data: dict[str, Any]) -> None:
        data["target"]["encoder"][field] = value

    with pytest.raises(BundleError, match=re.escape(words)):
        dsbd_ort.Pipeline.from_bundle(changed(source_pair, tmp_path, edit))


def test_cross_rows_of_another_shape(source_pair, tmp_path):
    def edit(data: dict[str, Any]) -> None:
        data["target"]["encoder"]["cross"][1]["key_width"] = 16

    with pytest.raises(BundleError, match=r"cross\.1\.key of shape"):
        dsbd_ort.Pipeline.from_bundle(changed(source_pair, tmp_path, edit))


def test_an_encoder_that_is_not_listed(source_pair, tmp_path):
    def edit(data: dict[str, Any]) -> None:
        del data["files"]["target/encoder.onnx"]

    with pytest.raises(BundleError, match=r"lists no target/encoder\.onnx"):
        dsbd_ort.Pipeline.from_bundle(changed(source_pair, tmp_path, edit))


def test_a_draft_that_alone_reads_a_source(source_pair, tmp_path):
    def edit(data: dict[str, Any]) -> None:
        data["target"]["encoder"] = None

    with pytest.raises(BundleError, match="reads a source, which requests to its target do not"):
        dsbd_ort.Pipeline.from_bundle(changed(source_pair, tmp_path, edit))


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
