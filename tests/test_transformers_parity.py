"""Rule "search" returns what transformers' generate returns, with and without speculation."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_ort.decoding import DecodingConfig, TableModel, decode
from tests.decoding.path_constraint import PathConstraint, some_tokens

VOCAB, EOS = 24, (3, 5)
NUM_PROMPTS, NEW_TOKENS = 200, 10


def tiny_llama(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target():
    torch.set_num_threads(1)  # the model is too small to share
    return tiny_llama(0)


@pytest.fixture(scope="module")
def draft(target):
    """The target with noise on its weights: a draft of some quality."""
    model = tiny_llama(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def table_of(model):
    """Logits by path, remembered; transformers' own forward, so only the search is compared."""
    known = {}

    def logits_of(path):
        if path not in known:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([path]), use_cache=False).logits[0]
            for end in range(1, len(path) + 1):
                known.setdefault(path[:end], logits[end - 1].numpy())
        return known[path]

    return logits_of


@pytest.fixture(scope="module")
def tables(target, draft):
    return table_of(target), table_of(draft)


PROMPTS = [
    np.random.default_rng(seed).integers(6, VOCAB, 1 + seed % 7).tolist()
    for seed in range(NUM_PROMPTS)
]


def theirs(model, prompt, num_beams, **options):
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=num_beams,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=list(EOS),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    if "prefix_allowed_tokens_fn" in options:  # beams without a legal path are padded at -1e9
        kept = out.sequences_scores > -1e6 if num_beams > 1 else [True]
        out.sequences = out.sequences[kept] if num_beams > 1 else out.sequences
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    return [cut_after_eos(row) for row in rows]


def cut_after_eos(tokens):
    ends = [i for i, token in enumerate(tokens) if token in EOS]
    return tokens[: ends[0] + 1] if ends else tokens


def ours(tables, prompt, num_beams, draft_length, **options):
    strategy = "speculative-beam-search" if draft_length else "beam-search"
    models = [TableModel(VOCAB, table) for table in tables]
    config = DecodingConfig(
        strategy=strategy,
        num_beams=num_beams,
        draft_length=draft_length,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=EOS,
        **options,
    )
    draft = models[1] if draft_length else None
    result = decode(models[0], draft, prompt, config, np.random.default_rng(0))
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 2, 4, 8])
def test_beam_search_on_200_prompts(target, tables, num_beams):
    for prompt in PROMPTS:
        expected = theirs(target, prompt, num_beams)
        for draft_length in (0, 1, 3, 5):
            assert ours(tables, prompt, num_beams, draft_length) == expected, (prompt, draft_length)


ALLOWED = some_tokens(VOCAB, always=EOS)
PREFIX_FUNCTION = {"prefix_allowed_tokens_fn": lambda _, ids: sorted(ALLOWED(tuple(ids.tolist())))}
CONSTRAINT = {"constraint": PathConstraint(VOCAB, ALLOWED, EOS)}
BITS = {"constraint": PathConstraint(VOCAB, ALLOWED, EOS, as_bits=True)}
PENALTY = {"repetition_penalty": 1.3}
NGRAMS = {"no_repeat_ngram_size": 2}
SOURCE_NGRAMS = {"encoder_no_repeat_ngram_size": 2}  # of the prompt, where there is no source
WORDS = {"bad_words_ids": [[7], [8, 9], [10, 11, 12]]}
LENGTH = {"min_new_tokens": 6}
FORCED = {"forced_eos_token_id": EOS[0]}
PROCESSING = {  # name: (options of transformers, ours)
    "constraint": (PREFIX_FUNCTION, CONSTRAINT),
    "constraint as bits": (PREFIX_FUNCTION, BITS),
    "repetition": (PENALTY, PENALTY),
    "reward of repetition": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "n-grams": (NGRAMS, NGRAMS),
    "single tokens": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "n-grams of the prompt": (SOURCE_NGRAMS, SOURCE_NGRAMS),
    "bad words": (WORDS, WORDS),
    "length": (LENGTH, LENGTH),
    "bias": (
        {"sequence_bias": {(6,): 2.0, (7,): -4.0}},
        {"logit_bias": {6: 2.0, 7: -4.0}},
    ),
    "suppressed": ({"suppress_tokens": [9, 14]}, {"suppress_tokens": [9, 14]}),
    "forced": (FORCED, FORCED),
    "penalty and n-grams": (PENALTY | NGRAMS, PENALTY | NGRAMS),
    "words and length": (WORDS | LENGTH, WORDS | LENGTH),
    "penalty and constraint": (PENALTY | PREFIX_FUNCTION, PENALTY | CONSTRAINT),
    "n-grams and forced": (NGRAMS | FORCED, NGRAMS | FORCED),
    "bias and bits": (
        {"sequence_bias": {(6,): 2.0}} | PREFIX_FUNCTION,
        {"logit_bias": {6: 2.0}} | BITS,
    ),
}


def check_processing(target, tables, name, num_beams, prompts, draft_lengths):
    their_options, our_options = PROCESSING[name]
    for prompt in prompts:
        expected = theirs(target, prompt, num_beams, **their_options)
        for draft_length in draft_lengths:
            found = ours(tables, prompt, num_beams, draft_length, **our_options)
            assert found == expected, (prompt, draft_length)


@pytest.mark.parametrize("name", PROCESSING)
def test_processing(target, tables, name):
    check_processing(target, tables, name, 1, PROMPTS[:5], (0, 3))
    check_processing(target, tables, name, 4, PROMPTS[5:15], (0, 3))


@pytest.mark.long
@pytest.mark.parametrize("num_beams", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PROCESSING)
def test_processing_on_200_prompts(target, tables, name, num_beams):
    check_processing(target, tables, name, num_beams, PROMPTS, (0, 1, 3))


OPTIONS = list(itertools.product([False, True, "never"], [1.0, 0.0, 2.0, -1.0]))


@pytest.mark.parametrize(("early_stopping", "length_penalty"), OPTIONS)
def test_stopping_penalty_and_several_sequences(target, tables, early_stopping, length_penalty):
    options = {
        "early_stopping": early_stopping,
        "length_penalty": length_penalty,
        "num_return_sequences": 3,
    }
    for prompt in PROMPTS[:12]:
        expected = theirs(target, prompt, 4, **options)
        for draft_length in (0, 3):
            assert ours(tables, prompt, 4, draft_length, **options) == expected, prompt


def test_speculation_saves_target_calls(tables):
    for prompt in PROMPTS[:5]:
        models = [TableModel(VOCAB, table) for table in tables]
        config = DecodingConfig(
            strategy="speculative-beam-search",
            num_beams=2,
            draft_beams=4,
            max_new_tokens=NEW_TOKENS,
        )
        stats = decode(*models, prompt, config, np.random.default_rng(0)).stats
        assert stats.num_iterations < NEW_TOKENS


def test_greedy_is_generate_with_one_beam(target, tables):
    for prompt in PROMPTS[:20]:
        config = DecodingConfig(
            strategy="greedy", temperature=0.0, max_new_tokens=NEW_TOKENS, eos_token_id=EOS
        )
        model = TableModel(VOCAB, tables[0])
        result = decode(model, None, prompt, config, np.random.default_rng(0))
        assert [result.sequences[0].token_ids] == theirs(target, prompt, 1)
