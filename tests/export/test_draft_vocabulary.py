"""A draft that proposes some tokens only, and one of another precision than its target."""

from __future__ import annotations

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
from dsbd_ort import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from scripts.shared_captures import SharedCaptures
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


def silent(_line: str) -> None:
    pass


COUNTS = np.array([0, 0, 5, 1, 7, 5, 0, 1])
CHOSEN = [  # (always, number of tokens, the tokens)
    ((), 3, [2, 4, 5]),
    ((), 4, [2, 3, 4, 5]),
    ((6,), 3, [2, 4, 6]),
    ((6, 0), 6, [0, 2, 3, 4, 5, 6]),
    ((7,), 7, [0, 1, 2, 3, 4, 5, 7]),
]


@pytest.mark.parametrize(("always", "number", "wanted"), CHOSEN)
def test_the_most_frequent_tokens_and_of_equal_ones_the_lowest(
    always: tuple[int, ...], number: int, wanted: list[int]
) -> None:
    found = most_frequent_tokens(COUNTS, always, number)
    assert found.tolist() == wanted and found.dtype == np.int64


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with another order of frequencies than that of the ids."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("zebra quiz jumps over vexing lazy dogs\n" * 40)
    (folder / "b.jsonl").write_text(json.dumps({"text": "waltz nymph for quick jigs vex bud"}))
    return folder


def logits_of_draft(bundle: Path) -> Any:
    with load_causal_lm(open_bundle(bundle), "draft") as draft:
        return logits_of(draft, *STEP)


@pytest.mark.parametrize("name", DRAFTS)
def test_its_logits_are_those_of_the_whole_draft_and_none_of_other_tokens(
    name: str, alone: Path, tmp_path: Path
) -> None:
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
def pair(
    tmp_path_factory: pytest.TempPathFactory,
    llama_folder: Path,
    small_llama_folder: Path,
    texts: Path,
    captures: SharedCaptures,
) -> Path:
    """A target in fp32 and a draft in int8-dynamic that proposes frequent tokens, top-k heads."""
    output = tmp_path_factory.mktemp("pair") / "bundle"
    lines: list[str] = []
    config = ExportConfig(
        target=str(llama_folder),
        draft=str(small_llama_folder),
        draft_quantize="int8-dynamic",
        draft_vocab=NUM_PROPOSED,
        draft_texts=(str(texts),),
        logits=f"topk:{NUM_TOP}",
        output=output,
    )
    export_bundle(config, report=lines.append, source_of=captures)
    (said,) = [line for line in lines if "proposes" in line]
    assert said.startswith(f"draft: proposes {NUM_PROPOSED} of {VOCAB_SIZE} tokens, ")
    assert said.endswith("% of the texts")
    return output


@pytest.fixture(scope="module")
def dense(
    pair: Path,
    small_llama_folder: Path,
    texts: Path,
    captures: SharedCaptures,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The same draft with all logits."""
    bundle = Path(shutil.copytree(pair, tmp_path_factory.mktemp("dense") / "bundle"))
    config = DraftConfig(
        bundle=bundle,
        draft=str(small_llama_folder),
        quantize="int8-dynamic",
        draft_vocab=NUM_PROPOSED,
        draft_texts=(str(texts),),
    )
    export_draft(config, report=silent, source_of=captures)
    return bundle


def test_the_manifest(pair: Path) -> None:
    manifest = open_bundle(pair, verify=True).manifest
    assert manifest.draft is not None
    assert (manifest.target.quantization, manifest.target.full_logits) == ("none", True)
    assert (manifest.draft.quantization, manifest.draft.full_logits) == ("int8-dynamic", False)
    assert manifest.draft.vocab_size == manifest.target.vocab_size == VOCAB_SIZE


def test_a_top_k_head_reads_the_proposed_tokens_alone(pair: Path, dense: Path) -> None:
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


def test_nothing_is_spread_over_the_vocabulary_with_a_top_k_head(pair: Path, dense: Path) -> None:
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


def test_a_forward_without_logit_rows(pair: Path, dense: Path) -> None:
    for bundle in (pair, dense):
        with load_causal_lm(open_bundle(bundle), "draft") as draft:
            found = logits_of(draft, *STEP[:3], np.arange(0))
            assert len(found if bundle == dense else found.top_ids) == 0


def test_mjsd_runs(pair: Path) -> None:
    with Pipeline.from_bundle(pair, num_threads=1) as pipe:
        options = {"strategy": "mjsd", "draft_length": 2, "temperature": 0.0}
        assert pipe.generate("def f1(", max_new_tokens=8, **options).sequences


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft_vocab": 31}, r"draft_vocab=31 is too few with logits='auto'; use at least 32"),
    (
        {"draft_vocab": 63, "logits": "topk:64"},
        "draft_vocab=63 is too few with logits='topk:64'; use at least 64",
    ),
    ({"draft_texts": ("a",)}, "draft_texts='a' has no meaning without draft_vocab"),
    ({"draft": None, "draft_vocab": 64}, "draft_vocab=64 has no meaning without a draft"),
    ({"draft": None, "draft_quantize": "int8"}, "draft_quantize='int8' has no meaning without"),
    ({"draft_quantize": "int3"}, "draft_quantize, of the draft: quantize='int3' is not known"),
    (
        {"draft_quantize": "int8-dynamic", "dtype": "fp16"},
        "draft_quantize, of the draft: quantize='int8-dynamic' has no form in dtype='fp16'",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refused_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError) as caught:
        ExportConfig(**{"target": "t", "draft": "d", "output": Path("b"), **options})
    assert words in str(caught.value)


def test_a_vocabulary_that_is_not_smaller(alone: Path, small_llama_folder: Path) -> None:
    config = DraftConfig(bundle=alone, draft=str(small_llama_folder), draft_vocab=VOCAB_SIZE)
    with pytest.raises(ExportError, match=f"leaves out none of {VOCAB_SIZE} tokens"):
        export_draft(config, report=silent)


def test_limits_are_those_of_the_target(tmp_path: Path) -> None:
    config = ExportConfig(
        target="t", draft="d", output=tmp_path, atol=1e-3, draft_quantize="int8-dynamic"
    )
    assert (config.of_draft.quantize, config.of_draft.atol) == ("int8-dynamic", None)
    same = ExportConfig(target="t", draft="d", output=tmp_path, atol=1e-3, draft_quantize="none")
    assert same.of_draft.atol == 1e-3


ADVISED = [  # vocabulary, hidden size, role, whether the head is the embedding, advised tokens
    (20_000, 32, "draft", True, 8192),
    (20_000, 32, "draft", False, 8192),
    (70_000, 16, "draft", False, 32768),
    (20_000, 32, "target", True, None),
    (4_000, 32, "draft", True, None),
]


@pytest.mark.parametrize(("size", "width", "role", "is_tied", "number"), ADVISED)
def test_a_shorter_head_is_advised_where_it_saves_much(
    size: int, width: int, role: str, is_tied: bool, number: int | None
) -> None:
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=is_tied,
    )
    model = LlamaForCausalLM(config)
    stub: Any = SimpleNamespace(
        role=role, vocab_size=size, proposed_tokens=None, names_proposed=False
    )
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
