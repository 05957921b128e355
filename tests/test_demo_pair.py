"""The promise on the shipped pair and its real engines."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from dsbd_export.demo import demo_pair
from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingConfig, TableModel, decode
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from tests.decoding.exact_laws import beam_sampling_law, chi_square_p_value
from tests.decoding.tables import final_beams
from tests.runtime.model_calls import logits_of

NAMES = "read write load parse open close get set find make".split()
THINGS = "json(path)", "lines(file)", "config(name, default)", "tree(node)", "url(self, value)"
PROMPTS = [f"def {name}_{thing}:\n" for name in NAMES for thing in THINGS]


def outputs(pipeline, prompt, **options):
    result = pipeline.generate(prompt, top_k=20, max_new_tokens=16, **options)
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_the_target_as_its_own_draft_is_always_accepted(demo_bundle, num_beams):
    bundle = open_bundle(demo_bundle)
    config = DecodingConfig(
        num_beams=num_beams, width_policy="fixed", draft_length=3, max_new_tokens=16, top_k=20
    )
    with load_causal_lm(bundle, "target") as target, load_causal_lm(bundle, "target") as draft:
        for seed in range(3):
            rng = np.random.default_rng(seed)
            stats = decode(target, draft, [0, 300, 301 + seed], config, rng).stats
            assert stats.acceptance_histogram == [0, 0, 0, 4]  # 16 tokens = 4 x (3 + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "coupling"),
    [("beam-sample", "gumbel"), ("dsbd", "gumbel"), ("dsbd", "rejection")],
)
def test_first_layers_follow_the_exact_law(demo_bundle, strategy, coupling):
    """Two layers at W=2, top-k 4, on the engines' own logits: 20,000 runs against recursion."""
    prompt, num_runs = (0, 300, 301), 20_000
    bundle = open_bundle(demo_bundle)
    with load_causal_lm(bundle, "target") as target, load_causal_lm(bundle, "draft") as draft:
        tables = [remembered(target, top_k=4), remembered(draft, top_k=4)]
        models = [TableModel(target.spec.vocab_size, table) for table in tables]
        config = DecodingConfig(
            strategy=strategy,
            coupling=coupling,
            num_beams=2,
            width_policy="fixed",
            top_k=4,
            max_new_tokens=2,
            num_return_sequences=2,
        )
        counts = Counter()
        for seed in range(num_runs):
            drafts = models[1] if strategy == "dsbd" else None
            result = decode(models[0], drafts, prompt, config, np.random.default_rng(seed))
            counts[final_beams(result)] += 1
        law = beam_sampling_law(tables[0], prompt, width=2, num_steps=2)
    assert set(counts) <= set(law)
    assert chi_square_p_value(counts, law, num_runs) > 1e-4


def remembered(model, top_k):
    """The engine as a table: logits after a path, all but the best ``top_k`` at -inf."""

    @cache
    def logits_after(path):
        model.keep(np.arange(0))
        length = len(path)
        mask = np.tri(length, dtype=np.bool_)
        last = np.array([length - 1])
        logits = logits_of(model, np.array(path), np.arange(length), mask, last)[0]
        cut = np.full_like(logits, -np.inf)
        best = np.argsort(-logits)[:top_k]
        cut[best] = logits[best]
        return cut

    return logits_after


def test_text_logprobs_and_statistics(demo_pipe):
    options = {"num_beams": 4, "top_k": 20, "max_new_tokens": 24, "seed": 1}
    # A draft that does not pay on a busy machine would be left out.
    result = demo_pipe.generate(PROMPTS[0], draft_policy="fixed", **options)
    best, stats = result.sequences[0], result.stats
    prompt = demo_pipe.tokenizer.encode(PROMPTS[0])
    assert PROMPTS[0] + best.text == demo_pipe.tokenizer.decode([*prompt, *best.token_ids])
    assert best.logprob == pytest.approx(sum(best.token_logprobs))
    assert stats.kv_bytes_peak > 0 and stats.target_s > 0 and stats.draft_s > 0
    assert stats.host_s > 0


@pytest.mark.parametrize(
    ("beams", "one", "drafts"),
    [("beam-sample", "sample", {}), ("dsbd", "speculative", {"draft_policy": "fixed"})],
)
def test_four_beams_take_the_memory_of_one(demo_bundle, beams, one, drafts):
    """At most 1.15 times, after 512 tokens, with 128 new ones."""
    peaks = []
    for strategy, shape in ((beams, {"num_beams": 4, "width_policy": "fixed"}), (one, {})):
        with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipeline:
            prompt = pipeline.tokenizer.encode(PROMPTS[0] * 60)[:512]
            options = {"top_k": 20, "seed": 1, "max_new_tokens": 128, "min_new_tokens": 128}
            result = pipeline.generate(prompt, strategy=strategy, **options, **shape, **drafts)
            peaks.append(result.stats.kv_bytes_peak)
    assert peaks[0] <= 1.15 * peaks[1]


def test_logprobs_equal_a_teacher_forced_pass(demo_pipe, demo_bundle):
    prompt = demo_pipe.tokenizer.encode(PROMPTS[1])
    best = demo_pipe.generate(prompt, num_beams=2, top_k=20, max_new_tokens=20).sequences[0]
    tokens = np.array(prompt + best.token_ids)
    with load_causal_lm(open_bundle(demo_bundle), "target") as model:
        size = len(tokens)
        rows = np.arange(len(prompt) - 1, size - 1)
        logits = logits_of(model, tokens, np.arange(size), np.tri(size, dtype=np.bool_), rows)
    logits = logits.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = log_probs[np.arange(len(rows)), best.token_ids]
    np.testing.assert_allclose(best.token_logprobs, expected, atol=1e-4)


def test_a_prompt_of_1500_tokens(demo_pipe):
    prompt = np.random.default_rng(0).integers(2, 4096, 1500).tolist()
    plain = outputs(demo_pipe, prompt, strategy="beam-sample", num_beams=2, seed=0)
    fixed = {"num_beams": 2, "width_policy": "fixed", "draft_length": 2, "seed": 0}
    assert outputs(demo_pipe, prompt, **fixed) == plain


@pytest.mark.slow
def test_beam_search_equals_transformers_on_the_checkpoint(demo_pipe):
    target = LlamaForCausalLM.from_pretrained(demo_pair()[0], dtype=torch.float32).eval()
    for prompt in PROMPTS[::5]:
        ids = demo_pipe.tokenizer.encode(prompt)
        with torch.inference_mode():
            tokens = torch.tensor([ids])
            expected = target.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_beams=4,
                do_sample=False,
                max_new_tokens=16,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
        for strategy in ("beam-search", "speculative-beam-search"):
            found = demo_pipe.generate(ids, strategy=strategy, num_beams=4, max_new_tokens=16)
            best = found.sequences[0].token_ids
            assert best == expected[: len(best)] and not any(expected[len(best) :]), prompt
