"""Rule "search" returns what transformers' generate returns, with and without speculation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_ort.decoding import DecodingConfig, TableModel, decode

VOCAB, EOS = 24, (3, 5)
NUM_PROMPTS, NEW_TOKENS = 200, 10


def tiny_llama(seed: int) -> LlamaForCausalLM:
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
    known: dict[tuple[int, ...], np.ndarray] = {}

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
