"""Processed distributions equal those of transformers' processors."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.warp import Warp
from tests.decoding.path_constraint import PathConstraint, some_tokens

VOCAB, EOS = 60, (4, 9)
ALLOWED = some_tokens(VOCAB, always=EOS)
SETTINGS = {  # our options, their processors in order
    "temperature, top-k and top-p": (
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        [
            theirs.TemperatureLogitsWarper(0.7),
            theirs.TopKLogitsWarper(20),
            theirs.TopPLogitsWarper(0.8),
        ],
    ),
    "min-p": ({"min_p": 0.2}, [theirs.MinPLogitsWarper(0.2)]),
    "typical-p": ({"typical_p": 0.6}, [theirs.TypicalLogitsWarper(0.6)]),
    "all warpers": (
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
        [
            theirs.TemperatureLogitsWarper(1.3),
            theirs.TopKLogitsWarper(30),
            theirs.TopPLogitsWarper(0.9),
            theirs.MinPLogitsWarper(0.05),
            theirs.TypicalLogitsWarper(0.9),
        ],
    ),
    "penalty": (
        {"repetition_penalty": 1.2},
        [theirs.RepetitionPenaltyLogitsProcessor(1.2)],
    ),
    "all processors": (
        {
            "logit_bias": {3: 1.5, 8: -2.0},
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": [[5], [1, 2]],
            "suppress_tokens": [7, 11],
            "constraint": PathConstraint(VOCAB, ALLOWED, EOS),
            "top_k": 10,
        },
        [
            theirs.SequenceBiasLogitsProcessor({(3,): 1.5, (8,): -2.0}),
            theirs.RepetitionPenaltyLogitsProcessor(1.2),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.NoBadWordsLogitsProcessor([[5], [1, 2]], eos_token_id=list(EOS)),
            theirs.PrefixConstrainedLogitsProcessor(
                lambda _, ids: sorted(ALLOWED(tuple(ids.tolist()))), num_beams=1
            ),
            theirs.SuppressTokensLogitsProcessor([7, 11]),
            theirs.TopKLogitsWarper(10),
        ],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_distributions_are_those_of_transformers(name):
    options, processors = SETTINGS[name]
    config = DecodingConfig(strategy="sample", eos_token_id=EOS, **options)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, 15, 1 + seed % 40).tolist()
        logits = (3.0 * rng.normal(size=(1, VOCAB))).astype(np.float32)
        scores = torch.from_numpy(logits.astype(np.float64))
        for processor in processors:
            scores = processor(torch.tensor([prompt]), scores)
        expected = torch.softmax(scores, dim=-1)[0].numpy()
        found = np.zeros(VOCAB)
        distribution = distribution_after(prompt, logits, config)
        found[distribution.tokens] = np.exp(distribution.log_probs)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_n_grams_of_a_source_are_those_of_transformers(size):
    config = DecodingConfig(strategy="sample", encoder_no_repeat_ngram_size=size)
    num_banned = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((1, VOCAB)).astype(np.float32)
        prompt = rng.integers(0, 4, seed % 5 + 1).tolist()
        source = rng.integers(0, 4, seed % 20 + 1).tolist()
        processor = theirs.EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([source]))
        scores = processor(torch.tensor([prompt]), torch.from_numpy(logits))
        num_banned += int((scores == -torch.inf).sum())
        found = np.zeros(VOCAB)
        distribution = distribution_after(prompt, logits, config, source)
        found[distribution.tokens] = np.exp(distribution.log_probs)
        np.testing.assert_allclose(found, torch.softmax(scores, dim=-1)[0].numpy(), atol=1e-6)
    assert num_banned > 10


def test_a_source_with_tokens_that_no_target_has():
    config = DecodingConfig(strategy="sample", encoder_no_repeat_ngram_size=1)
    distribution = distribution_after([0], np.zeros((1, VOCAB), np.float32), config, [2, VOCAB + 5])
    assert sorted(distribution.tokens.tolist()) == [t for t in range(VOCAB) if t != 2]


def distribution_after(prompt, logits, config, source=None):
    if not config.processes_logits:
        return Warp.of(config).distributions(DenseLogits(logits))[0]
    processing = RequestProcessing(config, config.constraint, prompt, VOCAB, source=source)
    nodes = np.array([0])
    return processing.distributions(DenseLogits(logits), nodes, is_draft=False)[0]
