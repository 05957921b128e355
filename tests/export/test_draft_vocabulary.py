"""A draft that proposes some tokens only, and one of another precision than its target."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, PhiConfig

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_draft
from dsbd_export.parts.draft_vocabulary import most_frequent_tokens, shorter_head_advice
from dsbd_export.parts.head import proposed_logits
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.export.conftest import SIZES
from tests.runtime.model_calls import logits_of

NUM_PROPOSED, NUM_TOP = 90, 8
EOS = 1
STEP = (np.array([5, 6, 7]), np.arange(3), np.tri(3, dtype=np.bool_), np.array([2, 0]))
DRAFTS: dict[str, Any] = {  # heads that differ: shared with the embedding, biased, capped
    "llama": LlamaConfig(**SIZES, num_hidden_layers=1),
    "llama, tied": LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=True),
    "phi": PhiConfig(**SIZES, num_hidden_layers=1),
    "gemma2": Gemma2Config(
        **SIZES, num_hidden_layers=2, head_dim=16, final_logit_softcapping=3.0, sliding_window=8
    ),
}


COUNTS = np.array([0, 0, 5, 1, 7, 5, 0, 1])
CHOSEN = [  # (always, number of tokens, the tokens)
    ((), 3, [2, 4, 5]),
    ((), 4, [2, 3, 4, 5]),
    ((6,), 3, [2, 4, 6]),
    ((6, 0), 6, [0, 2, 3, 4, 5, 6]),
    ((7,), 7, [0, 1, 2, 3, 4, 5, 7]),
]


def test_the_most_frequent_tokens_and_of_equal_ones_the_lowest():
    for always, number, wanted in CHOSEN:
        found = most_frequent_tokens(COUNTS, always, number)
        assert found.tolist() == wanted and found.dtype == np.int64


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts with another order of frequencies than that of the ids."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("zebra quiz jumps over vexing lazy dogs\n" * 40)
    (folder / "b.jsonl").write_text(json.dumps({"text": "waltz nymph for quick jigs vex bud"}))
    return folder


def logits_of_draft(bundle: Path) -> Any:
    with load_causal_lm(open_bundle(bundle), "draft") as draft:
        return logits_of(draft, *STEP)


@pytest.mark.parametrize("name", DRAFTS)
def test_its_logits_are_those_of_the_whole_draft_and_none_of_other_tokens(name, alone, tmp_path):
    """Tokens are chosen without texts: the lowest ids, and those that end a sequence."""
    checkpoint = write_checkpoint(tmp_path / "draft", DRAFTS[name])
    bundle = Path(shutil.copytree(alone, tmp_path / "bundle"))
    config = DraftConfig(bundle=bundle, draft=str(checkpoint), draft_vocab=NUM_PROPOSED)
    export_draft(config, report=silent)
    cut = logits_of_draft(bundle)
    tokens, *_, rows = STEP
    with torch.no_grad():
        model = load_model(open_draft(config))
        whole = model(torch.from_numpy(tokens)[None]).logits[0, rows].numpy()
    assert cut.shape == whole.shape == (2, VOCAB_SIZE)
    np.testing.assert_allclose(cut[:, :NUM_PROPOSED], whole[:, :NUM_PROPOSED], atol=2e-5)
    assert (cut[:, NUM_PROPOSED:] == -np.inf).all()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, llama_folder, small_llama_folder, texts, captures):
    """A target in fp32 and a draft in int8-dynamic that proposes frequent tokens, top-k heads."""
    output = tmp_path_factory.mktemp("pair") / "bundle"
    lines: list[str] = []
    options = {"draft_vocab": NUM_PROPOSED, "draft_texts": (str(texts),)}
    options |= {"draft_quantize": "int8-dynamic", "logits": f"topk:{NUM_TOP}", "output": output}
    config = ExportConfig(target=str(llama_folder), draft=str(small_llama_folder), **options)
    export_bundle(config, report=lines.append, source_of=captures)
    (said,) = [line for line in lines if "proposes" in line]
    assert said.startswith(f"draft: proposes {NUM_PROPOSED} of {VOCAB_SIZE} tokens, ")
    assert said.endswith("% of the texts")
    return output


@pytest.fixture(scope="module")
def dense(pair, small_llama_folder, texts, captures, tmp_path_factory):
    bundle = Path(shutil.copytree(pair, tmp_path_factory.mktemp("dense") / "bundle"))
    options = {"draft_vocab": NUM_PROPOSED, "draft_texts": (str(texts),)}
    config = DraftConfig(
        bundle=bundle, draft=str(small_llama_folder), quantize="int8-dynamic", **options
    )
    export_draft(config, report=silent, source_of=captures)
    return bundle


def test_a_top_k_head_reads_the_proposed_tokens_alone(pair, dense):
    manifest = open_bundle(pair, verify=True).manifest
    assert manifest.draft is not None
    assert (manifest.target.quantization, manifest.target.full_logits) == ("none", True)
    assert (manifest.draft.quantization, manifest.draft.full_logits) == ("int8-dynamic", False)
    assert manifest.draft.vocab_size == manifest.target.vocab_size == VOCAB_SIZE
    logits, found = logits_of_draft(dense), logits_of_draft(pair)
    is_proposed = logits[0] > -np.inf
    assert is_proposed.sum() == NUM_PROPOSED and is_proposed[EOS]
    assert not is_proposed[:NUM_PROPOSED].all()  # the texts say which
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_TOP]
    np.testing.assert_array_equal(found.top_ids, ids)
    np.testing.assert_array_equal(found.top_logits, np.take_along_axis(logits, ids, axis=1))
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, sums, rtol=1e-6)
    assert found.full is None


def test_nothing_is_spread_over_the_vocabulary_with_a_top_k_head(pair, dense):
    graphs = [
        onnx.load(bundle / "draft" / "model.onnx", load_external_data=False).graph
        for bundle in (pair, dense)
    ]
    scatters = ["ScatterElements" in {node.op_type for node in graph.node} for graph in graphs]
    assert scatters == [False, True]
    proposed = proposed_logits(graphs[1])
    assert proposed is not None and proposed.number == NUM_PROPOSED
    read = {name for node in graphs[0].node for name in node.input}
    assert {value.name for value in graphs[0].initializer} <= read


def test_a_forward_without_logit_rows(pair, dense):
    for bundle in (pair, dense):
        with load_causal_lm(open_bundle(bundle), "draft") as draft:
            found = logits_of(draft, *STEP[:3], np.arange(0))
            assert len(found if bundle == dense else found.top_ids) == 0


def test_a_vocabulary_that_is_not_smaller(alone, small_llama_folder):
    config = DraftConfig(bundle=alone, draft=str(small_llama_folder), draft_vocab=VOCAB_SIZE)
    with pytest.raises(ExportError, match=f"leaves out none of {VOCAB_SIZE} tokens"):
        export_draft(config, report=silent)


def test_limits_are_those_of_the_target(tmp_path):
    for quantize, atol in (("int8-dynamic", None), ("none", 1e-3)):
        config = ExportConfig(
            target="t", draft="d", output=tmp_path, atol=1e-3, draft_quantize=quantize
        )
        assert (config.of_draft.quantize, config.of_draft.atol) == (quantize, atol)


ADVISED = [  # vocabulary, hidden size, role, whether the head is the embedding, advised tokens
    (20_000, 32, "draft", True, 8192),
    (20_000, 32, "draft", False, 8192),
    (70_000, 16, "draft", False, 32768),
    (20_000, 32, "target", True, None),
    (4_000, 32, "draft", True, None),
]


@pytest.mark.parametrize(("size", "width", "role", "is_tied", "number"), ADVISED)
def test_a_shorter_head_is_advised_where_it_saves_much(size, width, role, is_tied, number):
    sizes = {"vocab_size": size, "hidden_size": width, "intermediate_size": 3 * width}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, tie_word_embeddings=is_tied))
    stub = SimpleNamespace(role=role, vocab_size=size, proposed_tokens=None, names_proposed=False)
    advice = shorter_head_advice(model, stub)
    if number is None:
        assert advice is None
    else:
        head, rest = size * width, sum(w.numel() for w in model.model.layers.parameters())
        left = (head * number / size + rest) / (head + rest)
        assert advice is not None
        assert f"is {head / (head + rest):.0%} of the weights that a call reads" in advice
        assert f"--draft-vocab {number} " in advice and f"would read {left:.0%} of them" in advice
    stub.proposed_tokens = np.arange(5)
    assert shorter_head_advice(model, stub) is None
