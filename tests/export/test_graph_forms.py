"""Forms of a graph, for CUDA and with grouped attention: the same logits by other nodes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from dsbd_export.capture.graph_checks import lint_for_tensorrt
from dsbd_export.config import HIDDEN
from dsbd_export.passes.optimize import group_query_heads
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import Exported, export
from tests.export.gate import export_alone
from tests.runtime.model_calls import logits_of, prefix_and_tree

FUSED_NORM = "SkipSimplifiedLayerNormalization"


@pytest.fixture(scope="module")
def for_cuda(exported, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("cuda") / "bundle"
    return export(replace(exported.config, output=output, form="cuda"), captures)


def operators(exported: Exported, role: str) -> Counter[str]:
    return Counter(node.op_type for node in exported.graph(role).node)


@pytest.mark.parametrize(("role", "num_layers"), [("target", 2), ("draft", 1)])
def test_a_layer_has_fewer_nodes(for_cuda, exported, role, num_layers):
    """The first norm has no sum before it; a layer ends in two, the last one before the head."""
    found, before = operators(for_cuda, role), operators(exported, role)
    assert (found[FUSED_NORM], found["RMSNormalization"]) == (2 * num_layers, 1)
    assert before["Add"] == 2 * num_layers and found["Add"] == 0
    assert found["Transpose"] == before["Transpose"] == 4 * num_layers  # heads, there and back
    assert found["Split"] == before["Split"] and found["Where"] == 1
    assert f"{role}: {2 * num_layers} norms take their sums, 1 masks are added" in for_cuda.report


def test_layers_share_the_numbers_of_a_mask(for_cuda):
    nodes = for_cuda.graph("target").node
    [added] = [node.output[0] for node in nodes if node.op_type == "Where"]
    assert [node.input[3] for node in nodes if node.op_type == "Attention"] == [added, added]


CASES = [  # (family, options, operators of which some stay)
    # Heads are normed between the split and the transposition.
    ("qwen3", {"dtype": "fp16"}, {FUSED_NORM: 4, "RMSNormalization": 5, "Split": 4}),
    # Norms in fp32 between casts, and one after attention and MLP: no sum before it.
    ("gemma2", {"dtype": "fp16"}, {FUSED_NORM: 0, "RMSNormalization": 9}),
    ("llama", {"quantize": "int4", "dtype": "fp16"}, {FUSED_NORM: 4, "MatMulNBits": 9}),
    ("llama", {"attention": "grouped"}, {FUSED_NORM: 4, "Where": 1, "Tile": 1}),
    ("gpt2", {}, {FUSED_NORM: 0}),
]


@pytest.mark.parametrize(("family", "options", "wanted"), CASES)
def test_families_and_precisions_pass_the_gate(family, options, wanted, captures, tmp_path):
    folder = write_family_checkpoint(family, tmp_path / "checkpoint")
    *_, model = export_alone(folder, tmp_path, captures, form="cuda", **options)
    found = Counter(node.op_type for node in model.graph.node)
    assert {op_type: found[op_type] for op_type in wanted} == wanted


MASKS = {
    "target": ["attention_mask", "attention_mask_sliding"],
    "draft": ["attention_mask_sliding"],
}


@pytest.fixture(scope="module")
def grouped(exported_others, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("grouped") / "bundle"
    return export(replace(exported_others.config, output=output, attention="grouped"), captures)


def test_every_node_attends_over_key_heads_and_layers_share_a_mask(grouped):
    for role, masks in MASKS.items():
        model = ir.load(grouped.config.output / role / "model.onnx")
        repeats = {node.outputs[0]: node for node in model.graph if node.op_type == "Tile"}
        # Masks are repeated as numbers: CUDA has no Tile of bool.
        added = [node.inputs[0].producer() for node in repeats.values()]
        assert sorted(node.inputs[0].name for node in added) == masks
        for node in added:
            assert node.op_type == "Where"
            numbers = [value.const_value.numpy().item() for value in node.inputs[1:]]
            assert numbers == [0, HIDDEN]
        for node in model.graph:
            if node.op_type == "Attention":
                assert node.inputs[0].producer().op_type == "Reshape"
                assert node.inputs[3] in repeats
        assert not lint_for_tensorrt(model)
        assert f"{role}: {len(masks)} attention nodes grouped" in grouped.report


def test_heads_with_keys_of_their_own_stay():
    shapes = {"query": (1, 2, "S", 8), "key": (1, 2, "C", 8), "value": (1, 2, "C", 8)}
    values = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in {**shapes, "mask": (1, 1, "S", "C")}.items()
    ]
    node = ir.Node("", "Attention", values, attributes=[ir.AttrFloat32("scale", 0.5)])
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 24}, name="one")
    assert group_query_heads(ir.Model(graph, ir_version=10)) == 0
    assert Counter(node.op_type for node in graph) == {"Attention": 1}


@pytest.mark.parametrize("form", [("for_cuda", "exported"), ("grouped", "exported_others")])
def test_contract_and_logits_are_those_of_the_portable_form(form, request):
    """A prefix of 11 rows, which crosses the window of 8, then a tree of five nodes."""
    bundles = [*map(request.getfixturevalue, form)]
    prefix, tree = prefix_and_tree()
    for role in ("target", "draft"):
        graph, portable = (bundle.graph(role) for bundle in bundles)
        assert (graph.input, graph.output) == (portable.input, portable.output)
        logits = []
        for bundle in bundles:
            assert bundle.result.manifest.target.parity.max_abs_error < 5e-5
            with load_causal_lm(open_bundle(bundle.config.output), role) as model:
                logits.append(np.concatenate([logits_of(model, *prefix), logits_of(model, *tree)]))
        np.testing.assert_allclose(*logits, atol=2e-5)
        assert np.ptp(logits[1]) > 0.1
