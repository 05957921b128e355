"""Models that attend in some layers only, from export to tokens: drafts stay invisible."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from dsbd_ort import Pipeline
from dsbd_ort.cli import inspect
from dsbd_ort.commands.bundle_summary import summarize_bundle
from dsbd_ort.decoding import DecodingRequest, decode_iterations
from dsbd_ort.decoding.result import result_of
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.engine.limits import cache_rows
from dsbd_runtime.bundle_files.bundle import FOLD_FILE, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.attention.cache_entries import attending, recurrent
from dsbd_runtime.parts.attention.kv_cache import bucket_capacity, row_bytes
from dsbd_runtime.parts.recent.recent_rows import path_bytes
from tests.exports import family_pair
from tests.made_once import made_once

NEW_TOKENS = 16
EOS = 1
# A convolution, a gated delta rule, and Mamba2; each drafted by a model of another kind.
DRAFTS = {"lfm2": "llama", "qwen3_5": "lfm2", "granite_hybrid": "qwen3_5"}
SAME_TOKENS = {
    "dsbd": "beam-sample",
    "speculative": "sample",
    "speculative-beam-search": "beam-search",
}


def prompts(number):
    """Of 1 to 150 tokens: some need several calls of a recurrence."""
    rng = np.random.default_rng(5)
    lengths = [1, 2, 150, 70, *rng.integers(1, 60, number)]
    return [rng.integers(3, 300, length).tolist() for length in lengths[:number]]


@pytest.fixture(scope="module", params=list(DRAFTS))
def hybrid(request, captures, tmp_path_factory):
    """A pipeline, and the checkpoint of its target."""
    name, make = family_pair(request.param, DRAFTS[request.param])
    folder = made_once(tmp_path_factory, name, partial(make, captures))
    with Pipeline.from_bundle(folder / "bundle", num_threads=1) as opened:
        yield opened, folder / request.param


def tokens(pipe, prompt, **options):
    options = {"max_new_tokens": NEW_TOKENS, **options}
    return [sequence.token_ids for sequence in pipe.generate(prompt, **options).sequences]


def check_searches(pipe, target, given, widths=(1, 4), num_new=NEW_TOKENS):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for prompt in given:
        for num_beams in widths:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                rows = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    num_beams=num_beams,
                    num_return_sequences=num_beams,
                    max_new_tokens=num_new,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=EOS,
                )
            theirs = [row[len(prompt) :].tolist() for row in rows]
            theirs = [row[: row.index(EOS) + 1] if EOS in row else row for row in theirs]
            beams = {"num_beams": num_beams, "num_return_sequences": num_beams}
            beams["max_new_tokens"] = num_new
            for strategy in ("beam-search", "speculative-beam-search"):
                assert tokens(pipe, prompt, strategy=strategy, **beams) == theirs, prompt


def test_a_search_is_that_of_transformers(hybrid):
    check_searches(*hybrid, prompts(5))


def test_beams_beyond_several_folds(hybrid):
    """Most of 190 rows is folded, drafted or not; what is kept is no more for it."""
    pipe, target = hybrid
    check_searches(pipe, target, [prompts(2)[1] * 12], widths=(2,), num_new=110)
    prompt = prompts(3)[2][:70]
    for drafted, plain in SAME_TOKENS.items():
        options = {"max_new_tokens": 120, "seed": 1, "drafter": "ngram"}
        beams = {} if plain == "sample" else {"num_beams": 2}
        wanted = tokens(pipe, prompt, strategy=plain, max_new_tokens=120, seed=1, **beams)
        assert tokens(pipe, prompt, strategy=drafted, **options, **beams) == wanted
    entry = pipe.bundle.entry("target")
    attention = bucket_capacity(256) * row_bytes(attending(entry.caches))
    with load_causal_lm(pipe.bundle, "target", settings=EngineSettings(num_threads=1)) as model:
        config = pipe.config({"strategy": "sample", "max_new_tokens": 150})
        result_of(
            decode_iterations(
                DecodingRequest(prompt_ids=prompt, config=config, rng=np.random.default_rng(0)),
                model,
                None,
            )
        )
        assert model.kv_bytes_peak <= attention + 2 * path_bytes(entry.caches)


@pytest.mark.parametrize("cut", [30, 64, 127, 149])
def test_a_prompt_that_begins_alike(hybrid, cut):
    """Rows that are folded are computed again from a checkpoint on, and the answer is the same."""
    pipe, _ = hybrid
    prompt = prompts(3)[2]
    other = [*prompt[:cut], *prompts(4)[3][:30]]
    options = {"strategy": "dsbd", "num_beams": 2, "seed": 3}
    tokens(pipe, [5], **options)
    wanted = tokens(pipe, other, **options)
    tokens(pipe, [5], **options)
    tokens(pipe, prompt, **{**options, "max_new_tokens": 80})
    assert tokens(pipe, other, **options) == wanted


@pytest.mark.long
def test_200_prompts(hybrid):
    check_searches(*hybrid, prompts(200))


def test_requests_after_different_checkpoints(hybrid):
    """Long and short prompts in the same calls, samples of one prompt, and a tiny budget."""
    pipe, _ = hybrid
    given = [prompts(3)[2][: 150 - 45 * i] for i in range(4)]
    options = {"strategy": "dsbd", "num_beams": 2, "max_new_tokens": 50}
    alone = [tokens(pipe, prompt, seed=seed, **options) for seed, prompt in enumerate(given)]
    entries = pipe.bundle.entry_by_role.values()
    of_path = sum(path_bytes(entry.caches) for entry in entries)
    of_row = sum(row_bytes(attending(entry.caches)) for entry in entries)
    limits = ServiceLimits(max_requests=4, kv_bytes=4 * of_path + 512 * of_row)
    with Service(pipe, limits) as service, ThreadPoolExecutor(len(given)) as callers:
        numbers = range(len(given))
        found = list(callers.map(lambda i: tokens(service, given[i], seed=i, **options), numbers))
        assert service.stats().max_rows == 512
    assert found == alone
    with pytest.raises(InputError, match=r"or lower max_requests \(4\)"):
        cache_rows(replace(limits, kv_bytes=4 * of_path), pipe.bundle)


def test_a_fold_graph_is_there_where_states_are(hybrid, tmp_path):
    bundle = hybrid[0].bundle
    has_states = bool(recurrent(bundle.entry("target").caches))
    assert bundle.model_path("target").with_name(FOLD_FILE).is_file() == has_states
    if not has_states:
        return
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.path, copy)
    manifest = json.loads((copy / "dsbd.json").read_text())
    del manifest["files"]["target/fold.onnx"]
    (copy / "dsbd.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"lists no target/fold\.onnx; export again"):
        open_bundle(copy)


def test_what_a_path_costs_is_shown(hybrid):
    summary = summarize_bundle(hybrid[0].bundle, verified=False).target
    caches = hybrid[0].bundle.entry("target").caches
    assert summary.kv_bytes_per_token == row_bytes(attending(caches))
    assert summary.kv_bytes_per_path == path_bytes(caches) > 0
    text = CliRunner().invoke(inspect, [str(hybrid[0].bundle.path)]).stdout
    assert f"{summary.kv_bytes_per_path:,}" in text
