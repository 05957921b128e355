"""Qwen3-ASR: encoder, logits and searches of the exported engine against transformers."""

import itertools

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.given.given_rows import GivenRows
from tests.given.forests import check_forest
from tests.given.sounds import (
    LENGTHS,
    inputs_of,
    noise,
    prompt_of,
    request_of,
)

ENCODER_LIMIT = 1e-5


@pytest.mark.parametrize("num_frames", LENGTHS)
def test_the_encoder_window_by_window_gives_transformers_rows(given_pipe, reference, num_frames):
    features = noise(num_frames)
    wanted = reference.rows(features)
    medium = given_pipe.bundle.manifest.target.given.medium
    with given_pipe.models.engines() as (target, _):
        encoder = target.part(GivenRows).encoder
        found = np.concatenate([encoder.rows(piece) for piece in medium.pieces(features)])
    assert found.shape == wanted.shape
    assert medium.num_rows(num_frames) == len(wanted)
    assert np.abs(found - wanted).max() <= ENCODER_LIMIT * np.abs(wanted).max()


def test_silence_and_tones_too(given_pipe, reference):
    silence = np.full((16, 200), -1.5, np.float32)
    tones = np.where(np.arange(16)[:, None] == np.arange(431) // 7 % 16, 1.2, -0.7)
    medium = given_pipe.bundle.manifest.target.given.medium
    with given_pipe.models.engines() as (target, _):
        for features in (silence, tones.astype(np.float32)):
            encoder, wanted = target.part(GivenRows).encoder, reference.rows(features)
            found = np.concatenate([encoder.rows(piece) for piece in medium.pieces(features)])
            assert np.abs(found - wanted).max() <= ENCODER_LIMIT * np.abs(wanted).max()


@pytest.mark.parametrize("frames", [(37,), (237,), (999,), (100, 50), (613, 1)], ids=str)
def test_logits_of_prompt_in_chunks_of_a_tree_and_below_a_kept_path(given_pipe, reference, frames):
    sounds = [noise(number, seed) for seed, number in enumerate(frames)]
    inputs = inputs_of(given_pipe, prompt_of(len(sounds)), sounds)
    with given_pipe.models.engines() as (engine, _):
        check_forest(engine, inputs, lambda path: reference.logits(path, sounds))


SEARCHES = [
    (1, {"strategy": "greedy"}),
    (1, {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 3}),
    (4, {"strategy": "beam-search"}),
    (4, {"strategy": "speculative-beam-search", "draft_length": 3, "draft_beams": 6}),
    (4, {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3}),
]


def check_searches(pipe, reference, frames, seeds, searches=SEARCHES):
    for seed, number in itertools.product(seeds, frames):
        sounds = [] if number is None else [noise(number, seed)]
        inputs = inputs_of(pipe, prompt_of(len(sounds), seed), sounds)
        wanted = {beams: reference.searched(inputs, sounds, beams, 14) for beams in (1, 4)}
        for beams, options in searches:
            of_beams = {"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {}
            (result,) = pipe.models.decoded([request_of(pipe, inputs, **of_beams, **options)])
            ids, scores = wanted[beams]
            assert [sequence.token_ids for sequence in result.sequences] == ids, (number, options)
            for sequence, score in zip(result.sequences, scores, strict=False):
                assert sequence.score == pytest.approx(score, abs=1e-5)


def test_searches_with_and_without_drafts_are_transformers(given_pipe, reference):
    check_searches(given_pipe, reference, (37, 237), (0,))


def test_text_alone_in_a_speech_bundle_is_transformers(given_pipe, reference):
    check_searches(given_pipe, reference, (None,), (0, 1))


@pytest.mark.slow
def test_more_searches(given_pipe, reference):
    check_searches(given_pipe, reference, LENGTHS, (1, 2, 3))


PUBLISHED = {  # widths of the published models over 16, three layers of each part
    "0.6B": (
        {"d_model": 56, "encoder_attention_heads": 14, "encoder_ffn_dim": 224},
        {"hidden_size": 64, "intermediate_size": 192},
    ),
    "1.7B": (
        {"d_model": 64, "encoder_attention_heads": 16, "encoder_ffn_dim": 256},
        {"hidden_size": 128, "intermediate_size": 384},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_shapes_of_both_parts(name, captures, tmp_path):
    """128 mels, windows of 8 s, 16 heads that share 8 of keys."""
    from scripts.qwen3_asr_checkpoint import write_qwen3_asr
    from tests.exports import export_quietly
    from tests.given.sounds import Reference

    audio, text = PUBLISHED[name]
    audio |= {"num_mel_bins": 128, "n_window_infer": 800, "encoder_layers": 3}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
    folder = write_qwen3_asr(
        tmp_path / "whole", audio=audio, deviation=0.1, num_hidden_layers=3, **heads, **text
    )
    bundle = open_bundle(export_quietly(captures, tmp_path / "bundle", folder))
    reference, medium = Reference.of(folder), bundle.manifest.target.given.medium
    with load_causal_lm(bundle, "target") as engine:
        encoder = engine.part(GivenRows).encoder
        for num_frames in (50, 800, 801, 3_000):
            features = noise(num_frames, num_mels=128)
            found = np.concatenate([encoder.rows(piece) for piece in medium.pieces(features)])
            wanted = reference.rows(features)
            assert found.shape == wanted.shape
            assert np.abs(found - wanted).max() <= ENCODER_LIMIT * np.abs(wanted).max()
