"""Every family of the table: one tiny random checkpoint, the whole parity gate."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import HeliumConfig

from dsbd_export.checkpoint import open_checkpoint
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.families import FAMILIES, AttentionForm
from dsbd_export.graph_checks import check_contract
from dsbd_export.model_loading import load_model
from dsbd_export.model_source import source_of
from dsbd_export.parity import MAX_ABS_ERROR, ParityLimit
from dsbd_export.parity_cases import forest_cases, references
from dsbd_export.pipeline import export_model
from scripts.family_checkpoints import (
    FAMILY_CHECKPOINTS,
    VOCAB_SIZE,
    WINDOW,
    write_checkpoint,
    write_family_checkpoint,
)
from scripts.family_matrix import PRECISIONS, Failure, build_engines_of, export_in
from scripts.shared_captures import SharedCaptures
from tests.export.gate import check_parity

KINDS = ["prefill", "decode", "tree"]
NEAR = "attention_mask_sliding"


ONE_OF_EACH = list(  # the first variant of every family
    {row.family: name for name, row in reversed(FAMILY_CHECKPOINTS.items())}.values()
)[::-1]
# An attention node, one with a window on some layers, the model's own arithmetic, softcap, experts
ENGINES_BUILT = ("llama", "qwen2", "gptj", "gemma2", "qwen2_moe")
NOT_EXACT = ("gemma4-e2b", "minicpm3")  # layers that share rows, values narrower than keys
AS_FP32 = [column for column, (dtype, *_) in PRECISIONS.items() if dtype == "fp32"][1:]


def export_alone(
    checkpoint_folder: Path, folder: Path, max_context: int | None = None, sources=source_of
):
    """The checkpoint, its manifest entry and its graph."""
    options = ExportConfig(target="", draft="", output=folder, max_context=max_context)
    checkpoint = open_checkpoint("target", checkpoint_folder, options)
    entry = export_model(checkpoint, folder, options, lambda _line: None, sources)
    checkpoint = replace(checkpoint, caches=tuple(entry.caches))
    return checkpoint, entry, onnx.load(folder / "target" / "model.onnx", load_external_data=False)


def form_of(graph: onnx.GraphProto) -> AttentionForm:
    if any(node.op_type == "Attention" for node in graph.node):
        return AttentionForm.NODE
    chosen = {node.output[0] for node in graph.node if node.op_type == "Where"}
    for node in graph.node:  # in their order
        if node.op_type in ("Reshape", "Concat") and node.input[0] in chosen:
            chosen.add(node.output[0])
    softmaxes = [node for node in graph.node if node.op_type == "Softmax"]
    is_capped = any(node.input[0] in chosen for node in softmaxes)  # a router has one too
    return AttentionForm.CAPPED if is_capped else AttentionForm.OWN


NAMES = [
    name if row.is_quick else pytest.param(name, marks=pytest.mark.long)
    for name, row in FAMILY_CHECKPOINTS.items()
]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_passes_the_whole_gate(name, tmp_path):
    """In fp32; one variant then, of the same capture, in one of the others with exact attention."""
    row = FAMILY_CHECKPOINTS[name]
    folder, captures = write_family_checkpoint(name, tmp_path / "checkpoint"), SharedCaptures()
    checkpoint, entry, model = export_alone(folder, tmp_path, row.max_context, captures)
    family = FAMILIES[row.family]
    assert entry.family == row.family
    assert entry.parity.max_abs_error < 5e-5  # half of what the gate lets pass
    window = [] if entry.sliding_window is None else [WINDOW + 17]
    lengths = sorted([1, 17, *window, 128])
    cases = [(case.prompt_length, case.name) for case in entry.parity.cases]
    forests = [(length, kind) for length in lengths for kind in KINDS]
    assert cases == [*forests, (checkpoint.context_length, "text")]
    assert form_of(model.graph) is family.attention
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["TopK"] == (entry.num_layers if family.has_experts else 0)
    assert ("window" in family.note) >= (entry.sliding_window is not None)
    if name in ONE_OF_EACH:
        column = AS_FP32[ONE_OF_EACH.index(name) % len(AS_FP32)]
        check_exact(name, export_in(column, name, folder, tmp_path / column, captures))


def check_exact(name: str, result: float | Failure) -> None:
    """All families are exact, or refuse to be."""
    is_refused = isinstance(result, Failure) and "use attention='fused'" in result.reason
    assert is_refused if name in NOT_EXACT else not isinstance(result, Failure), result


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_family_passes_in_every_precision(name, tmp_path):
    """scripts/export_matrix exports every variant in every precision."""
    folder, captures = write_family_checkpoint(name, tmp_path / "checkpoint"), SharedCaptures()
    for column in AS_FP32:
        check_exact(name, export_in(column, name, folder, tmp_path / column, captures))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ENGINES_BUILT else pytest.mark.slow)
        for name in ONE_OF_EACH
    ],
)
def test_a_family_passes_in_fp16_and_engines_are_built_of_it(name, tmp_path):
    checkpoint = write_family_checkpoint(name, tmp_path / "checkpoint")
    parity = export_in("fp16 KL", name, checkpoint, tmp_path / "fp16", SharedCaptures())
    assert not isinstance(parity, Failure), parity
    pytest.importorskip("tensorrt_rtx")
    attention = build_engines_of(tmp_path / "fp16" / "target")
    assert not isinstance(attention, Failure), attention


def test_a_family_that_is_not_in_the_table_is_tried(tmp_path):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = HeliumConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=64, pad_token_id=0, **sizes, **heads
    )
    folder = write_checkpoint(tmp_path / "checkpoint", config)
    _, entry, model = export_alone(folder, tmp_path)
    assert "helium" not in FAMILIES
    assert (entry.family, form_of(model.graph)) == ("helium", AttentionForm.NODE)
    assert entry.parity.max_abs_error < 5e-5


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_an_epsilon_of_1e_8_stays_in_the_norms(dtype, tmp_path):
    """A padding token's embedding is zero: without epsilon its norm is not a number."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    config = HeliumConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        max_position_embeddings=64,
        rms_norm_eps=1e-8,
        **heads,
    )
    folder = write_checkpoint(tmp_path / "checkpoint", config)
    options = ExportConfig(target="", draft="", output=tmp_path, dtype=dtype)
    checkpoint = open_checkpoint("target", folder, options)
    first_prompt = forest_cases(checkpoint)[0].node_ids
    set_embedding_to_zero(folder / "model.safetensors", first_prompt)
    entry = export_model(checkpoint, tmp_path, options, lambda _line: None)
    model = onnx.load(tmp_path / "target" / "model.onnx", load_external_data=False)
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["RMSNormalization"] == 3
    assert entry.parity.max_abs_error < (5e-5 if dtype == "fp32" else 0.1)


def set_embedding_to_zero(file: Path, tokens: NDArray[np.int64]) -> None:
    weights = load_file(file)
    weights["model.embed_tokens.weight"][tokens] = 0
    save_file(weights, file, metadata={"format": "pt"})


def test_the_table_and_the_checkpoints_are_about_the_same_families():
    supported = {name for name, family in FAMILIES.items() if family.refusal is None}
    assert {row.family for row in FAMILY_CHECKPOINTS.values()} == supported
    assert list(FAMILIES) == sorted(FAMILIES)


def see_everything(graph: onnx.GraphProto) -> None:
    """Let every sliding layer read the full mask."""
    for node in graph.node:
        node.input[:] = ["attention_mask" if name == NEAR else name for name in node.input]


def see_the_window_everywhere(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.input[:] = [NEAR if name == "attention_mask" else name for name in node.input]


def count_positions_from_the_first_new_row(graph: onnx.GraphProto) -> None:
    """Positions 0, 1, ... in every call: right for a prefill, wrong behind a prefix."""
    for node in graph.node:
        node.input[:] = ["own" if name == "position_ids" else name for name in node.input]
    graph.node.insert(0, onnx.helper.make_node("Sub", ["position_ids", "write_indices"], ["own"]))


WRONG_MASKS = [see_everything, see_the_window_everywhere]
MUTATIONS = [  # (mutation, the first case that must fail)
    (see_everything, "prefill after 17 tokens"),
    (see_the_window_everywhere, "prefill after 17 tokens"),
    (count_positions_from_the_first_new_row, "decode after 1 tokens"),
]


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_wrong_masks_and_positions_fail_with_a_sliding_window(name, tmp_path):
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    checkpoint, _, model = export_alone(folder, tmp_path)
    wanted = references(load_model(checkpoint), checkpoint)
    limit = ParityLimit(MAX_ABS_ERROR, 1e-4)
    for mutate, words in MUTATIONS:
        mutated = onnx.ModelProto()
        mutated.CopyFrom(model)
        mutate(mutated.graph)
        if mutate in WRONG_MASKS:
            with pytest.raises(ExportError, match="its layers attend with"):
                check_contract(ir.from_proto(mutated), checkpoint, form_of(model.graph))
        onnx.save(mutated, tmp_path / "target" / "model.onnx")
        with pytest.raises(ExportError, match=f"case {words}"):
            check_parity(tmp_path / "target", checkpoint, wanted, limit)
