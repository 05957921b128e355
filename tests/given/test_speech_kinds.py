"""Granite Speech (plus), GLM-ASR, Qwen2-Audio: encoders, prompts, logits, searches, sharing."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsbd_ort import Pipeline
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given.given_rows import GivenRows
from scripts.speech_checkpoints import MODELS
from tests.given.forests import LOGIT_LIMIT, check_forest, forwarded
from tests.given.speech_kinds import (
    SpeechReference,
    asked,
    inputs_of,
    options_of,
)
from tests.given.test_sharing import STRATEGIES, check_equal
from tests.ort_sessions import cpu_session
from tests.robustness.preempting import TALLY, ForcedPreemptions
from tests.speech.sounds import RATE, noise, speech_like

ENCODER_LIMIT = 1e-5
IN_CI = ("granite_speech",)
SECONDS = (0.05, 0.3, 0.4001, 0.79, 1.0, 1.99, 2.0, 3.301, 5.1, 7.0)  # blocks, windows: all parts


def longest(name):
    return 2.0 if name == "qwen2_audio" else 8.0


@pytest.fixture(
    scope="module",
    params=[
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in MODELS
    ],
)
def kind(request, speech_model):
    """The name of a kind, its pipeline, and transformers' model and processor."""
    name = request.param
    folder = speech_model(name)
    with Pipeline.from_bundle(folder / "bundle", num_threads=1) as pipe:
        yield name, pipe, SpeechReference.of(name, folder / "target")


def test_encoders_give_transformers_rows(kind):
    name, pipe, reference = kind
    with pipe.models.engines() as (engine, _):
        encoder = engine.part(GivenRows).encoder
        for seconds in SECONDS:
            samples = noise(seconds, round(seconds * 100))
            if seconds > longest(name) or (seconds < 0.1 and not name.startswith("granite")):
                continue  # transformers has no rows of such a sound
            source, wanted = inputs_of(pipe, samples).source, reference.rows(samples)
            found = np.concatenate([encoder.rows(piece) for piece in source.pieces])
            assert found.shape == wanted.shape, seconds
            assert np.abs(found - wanted).max() <= ENCODER_LIMIT * np.abs(wanted).max(), seconds


def test_ctc_logits_are_transformers(kind):
    name, pipe, reference = kind
    if not name.startswith("granite"):
        assert not pipe.bundle.manifest.target.given.medium.encoder_outputs
        return
    session, encoder = cpu_session(pipe.bundle.path / "target/encoder.onnx"), reference.model.model
    for seconds in SECONDS:
        samples = noise(seconds, 3)
        [piece] = inputs_of(pipe, samples).source.pieces
        features = reference.inputs(samples, "the fox")["input_features"]
        with torch.no_grad():
            states = encoder.encoder(features).last_hidden_state
            wanted = encoder.encoder.out(states[..., -64:])[0].numpy()
        [found] = session.run(["ctc_logits"], dict(piece.inputs))
        # the head that spells a text has large weights
        assert np.abs(found[: len(wanted)] - wanted).max() <= 5e-4 * np.abs(wanted).max(), seconds


def test_prompts_are_the_processors(kind):
    name, pipe, reference = kind
    for seconds in SECONDS:
        if seconds > longest(name) or (seconds < 0.1 and not name.startswith("granite")):
            continue
        samples = noise(seconds)
        for text in ("the fox", "Das Haus\n<|spare_1|>"):
            wanted = reference.inputs(samples, text)["input_ids"][0].tolist()
            assert inputs_of(pipe, samples, text).prompt_ids == wanted, seconds


def test_logits_of_prompt_in_chunks_of_a_tree_and_below_a_kept_path(kind):
    name, pipe, reference = kind
    for seconds in (0.3, longest(name) - 0.05):
        samples = speech_like(seconds)
        theirs = reference.inputs(samples, "the fox")
        with pipe.models.engines() as (engine, _):
            inputs = inputs_of(pipe, samples)
            check_forest(engine, inputs, lambda path, more=theirs: reference.logits(path, more))


SEARCHES = [
    (1, {"strategy": "greedy"}),
    (1, {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 3}),
    (4, {"strategy": "beam-search"}),
    (4, {"strategy": "speculative-beam-search", "drafter": "ngram", "draft_length": 3}),
]


def check_searches(kind, seconds, seeds):
    name, pipe, reference = kind
    for seed, number in itertools.product(seeds, seconds):
        if number is not None and number > longest(name):
            continue
        samples = None if number is None else noise(number, seed)
        inputs = inputs_of(pipe, samples)
        ids = torch.tensor([inputs.prompt_ids])
        text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        theirs = text if samples is None else reference.inputs(samples, "the fox")
        wanted = {beams: reference.searched(theirs, beams, 14) for beams in (1, 4)}
        for beams, options in SEARCHES:
            of_beams = {"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {}
            request = pipe.request_of(inputs, options_of(name, **of_beams, **options))
            (result,) = pipe.models.decoded([request])
            tokens, scores = wanted[beams]
            assert [each.token_ids for each in result.sequences] == tokens, (number, options)
            for sequence, score in zip(result.sequences, scores, strict=False):
                assert sequence.score == pytest.approx(score, abs=1e-5)


def test_searches_with_and_without_drafts_are_transformers(kind):
    check_searches(kind, (None, 0.3, 1.9), (0,))


@pytest.mark.long
def test_more_searches(kind):
    # of several windows transformers' beams are wrong
    most = 7.0 if kind[0].startswith("granite") else 1.99
    check_searches(kind, [each for each in SECONDS if 0.1 < each <= most], (1, 2, 3))


def test_beams_over_several_windows_have_the_scores_of_transformers_forward(kind):
    name, pipe, reference = kind
    if name == "qwen2_audio":  # reads one window
        with pytest.raises(InputError, match=r"3\.0 s is given, this model reads 2 s at most"):
            inputs_of(pipe, noise(3.0))
        return
    samples = noise(5.1)
    inputs, theirs = inputs_of(pipe, samples), reference.inputs(samples, "the fox")
    options = {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4}
    (result,) = pipe.models.decoded([pipe.request_of(inputs, options_of(name, **options))])
    for sequence in result.sequences:
        tokens, size = list(sequence.token_ids), len(inputs.prompt_ids)
        if MODELS[name].placeholder in tokens:
            continue  # transformers' forward over a whole path expects a row there
        logits = reference.logits([*inputs.prompt_ids, *tokens], theirs)
        log_probs = torch.from_numpy(logits).log_softmax(-1)[size - 1 : -1]
        total = float(log_probs[range(len(tokens)), tokens].sum())
        assert sequence.score == pytest.approx(total / len(tokens), abs=1e-4)


def test_a_generated_placeholder_of_granite_is_read_as_the_first_token(kind):
    name, pipe, _ = kind
    inputs, found = inputs_of(pipe, noise(0.3)), []
    for token in (MODELS[name].placeholder, 0):
        with pipe.models.engines() as (engine, _):
            size = len(inputs.prompt_ids)
            ids, mask = [*inputs.prompt_ids, token], np.tri(size + 1, dtype=np.bool_)
            found.append(forwarded(engine, ids, range(size + 1), mask, inputs.source)[-1])
    is_alike = np.abs(found[0] - found[1]).max() <= LOGIT_LIMIT
    assert is_alike == name.startswith("granite")


def requests_of(name, pipe, options):
    lengths = [min(each, longest(name)) for each in (0.3, 0.4, 1.0, 1.9, 1.9, 3.0)]
    samples = [*(noise(each, seed) for seed, each in enumerate(lengths)), None, speech_like(1.0)]
    return [
        pipe.request_of(inputs_of(pipe, each), options_of(name, **{**options, "seed": seed}))
        for seed, each in enumerate(samples)
    ]


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options["strategy"])
def test_eight_together_and_preempted_are_as_alone(kind, options):
    name, pipe, _ = kind
    options = {**options, "drafter": "ngram"} if "draft_length" in options else options
    alone = []
    for request in requests_of(name, pipe, options):
        with pipe.models.engines() as models:
            alone += decoded_together(BatchedDecoder(*models), [request], 1)
    with pipe.models.engines() as models:
        together = requests_of(name, pipe, options)
        check_equal(decoded_together(BatchedDecoder(*models), together, 8), alone)
    before = TALLY.num_preempted
    preempted = [
        replace(request, preempts=ForcedPreemptions(seed))
        for seed, request in enumerate(requests_of(name, pipe, options))
    ]
    with pipe.models.engines() as models:
        check_equal(decoded_together(BatchedDecoder(*models), preempted, 8), alone)
    assert TALLY.num_preempted > before


def test_typed_placeholders_stay_text(kind):
    name, pipe, _ = kind
    spelled = MODELS[name].special_tokens[0]
    media, samples = pipe.media, noise(0.3)
    typed = media.read(asked(samples, f"the {spelled} fox"))
    plain = media.read(asked(samples, "the fox"))
    placeholder = MODELS[name].placeholder
    assert list(typed).count(placeholder) == list(plain).count(placeholder)
    assert pipe.tokenizer.with_special_tokens.decode(list(typed)).endswith(
        pipe.tokenizer.with_special_tokens.decode(
            list(media.read([{"role": "user", "content": f"the {spelled} fox"}]))
        )[-12:]
    )
    assert len(samples) == 0.3 * RATE
