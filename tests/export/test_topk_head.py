"""The head of a graph: top-k candidates, and drafts that propose some tokens only."""

import json
import re
import shutil
from dataclasses import replace
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
from dsbd_export.parts.head import HeadRows, head_problem, proposed_logits
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.export.conftest import SIZES, export
from tests.runtime.model_calls import logits_of

NUM_PROPOSED, NUM_TOP = 90, 8
EOS = 1
STEP = (np.array([5, 6, 7]), np.arange(3), np.tri(3, dtype=np.bool_), np.array([2, 0]))


@pytest.fixture(scope="module")
def exported_topk(exported, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("topk") / "bundle"
    logits = f"topk:{NUM_TOP}"
    return export(replace(exported.config, output=output, logits=logits), captures)


def test_outputs_operators_manifest_and_report(exported_topk, exported):
    for role in ("target", "draft"):
        topk, dense = exported_topk.graph(role), exported.graph(role)
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in topk.output[:3]
        }
        assert shapes == {"top_logits": ["R", 8], "top_ids": ["R", 8], "logsumexp": ["R"]}
        assert list(topk.output[3:]) == list(dense.output)  # logits and caches
        assert topk.input == dense.input
        assert not any(node.domain for node in topk.node)
        head = [node.op_type for node in topk.node[len(dense.node) :]]
        assert head == ["TopK", "Slice", "Slice", "LogSoftmax", "GatherElements", "Sub", "Squeeze"]
    manifest = open_bundle(exported_topk.config.output, verify=True).manifest
    for entry in (manifest.target, manifest.draft):
        assert (entry.logits, entry.full_logits) == ("topk:8", True)
    assert sum("top-k head" in line for line in exported_topk.report) == 2


def test_a_large_vocabulary_has_the_head_by_default(exported, captures, tmp_path, monkeypatch):
    monkeypatch.setattr("dsbd_export.config.LARGE_VOCABULARY", 300)
    config = replace(exported.config, output=tmp_path / "bundle")
    assert config.logits == "auto"
    manifest = export(config, captures).result.manifest
    assert (manifest.target.logits, manifest.draft.logits) == ("topk:64", "topk:64")


def assert_best(found, logits, number, **tolerance):
    """Compare the candidates of a top-k head, and the log of the sum, with all logits."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :number]
    np.testing.assert_array_equal(found.top_ids, ids)
    best = np.take_along_axis(logits, ids, axis=1)
    np.testing.assert_allclose(found.top_logits, best, **tolerance)
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, sums, **tolerance)


def test_candidates_are_those_of_the_dense_export(exported_topk, exported):
    for role in ("target", "draft"):
        with load_causal_lm(open_bundle(exported.config.output), role) as dense:
            logits = logits_of(dense, *STEP)
        with load_causal_lm(open_bundle(exported_topk.config.output), role) as topk:
            found = logits_of(topk, *STEP)
            full = found.full.read(np.arange(2))
        assert_best(found, logits, NUM_TOP, rtol=1e-6)
        np.testing.assert_allclose(full, logits, rtol=1e-6, atol=1e-6)
        best = np.take_along_axis(full, found.top_ids, axis=1)
        np.testing.assert_array_equal(best, found.top_logits)


PRECISIONS = [{"dtype": "fp16"}, {"dtype": "bf16"}, {"quantize": "int8-dynamic"}]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: "-".join(p.values()))
def test_the_head_on_other_precisions_passes_its_gate(small_llama_folder, tmp_path, precision):
    folder = str(small_llama_folder)
    config = ExportConfig(
        target=folder, draft=folder, output=tmp_path / "b", logits="topk:300", **precision
    )
    manifest = export_bundle(config, report=silent).manifest
    assert (manifest.target.logits, manifest.draft.logits) == ("topk:300", "topk:300")


def test_more_candidates_than_tokens_are_refused_before_anything_is_written(exported, tmp_path):
    config = replace(exported.config, output=tmp_path / "bundle", logits="topk:301")
    with pytest.raises(ExportError, match=r"'topk:301' names more .* tokens, 300; use topk:300"):
        export_bundle(config, report=silent)
    assert not list(tmp_path.iterdir())


LOGITS = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32) * 3


def best_rows(first=0):
    """Return the rows of a head from the ``first`` best token on."""
    ids = np.argsort(-LOGITS, axis=1)[:, first : first + NUM_TOP]
    sums = np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return HeadRows(ids, np.take_along_axis(LOGITS, ids, axis=1), sums, LOGITS.copy())


def of_candidates(places):
    rows = best_rows()
    return replace(rows, top_ids=rows.top_ids[:, places], top_logits=rows.top_logits[:, places])


def changed(name, place, change):
    array = getattr(rows := best_rows(), name)
    array[place] = change(array[place])
    return rows


DAMAGE = [
    (of_candidates(slice(1, None)), r"shape \(3, 7\), expected \(3, 8\)"),
    (of_candidates(slice(None, None, -1)), "top_logits differs"),
    (best_rows(first=1), "top_logits differs"),
    (changed("top_ids", (2, 3), lambda token: (token + 1) % 300), "top_ids differs"),
    (changed("top_logits", (1, 5), lambda logit: logit + 1e-3), "top_logits differs by 0.001"),
    (changed("logsumexp", 0, lambda total: total + 1e-3), "logsumexp differs by 0.001"),
    (changed("logsumexp", 0, lambda _: np.nan), "logsumexp differs by nan"),
    (changed("logits", (2, 299), lambda logit: logit + 1e-3), "logits differs by 0.001"),
    (
        replace(best_rows(), logits=LOGITS[:2]),
        r"logits has shape \(2, 300\), expected \(3, 300\)",
    ),
]


@pytest.mark.parametrize(("rows", "words"), DAMAGE)
def test_a_wrong_head_is_named(rows, words):
    assert head_problem(best_rows(), LOGITS, NUM_TOP) is None
    problem = head_problem(rows, LOGITS, NUM_TOP)
    assert problem is not None and re.search(words, problem), problem


def test_a_token_named_twice_is_caught():
    logits = np.zeros((1, 10), np.float32)
    sums = np.log([10.0]).astype(np.float32)
    rows = HeadRows(np.array([[0, 0]]), np.zeros((1, 2), np.float32), sums, logits)
    assert head_problem(rows, logits, 2) == "top_ids names a token twice"


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
    assert_best(found, logits, NUM_TOP, rtol=1e-6)
    best = np.take_along_axis(logits, found.top_ids, axis=1)
    np.testing.assert_array_equal(found.top_logits, best)
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
