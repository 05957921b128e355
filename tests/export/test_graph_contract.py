"""The exported graphs against the contract, name by name and node by node."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
from onnx import TensorProto

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm

INT64, BOOL, FLOAT = TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT
CACHE = (FLOAT, [1, 2, "C", 12])

INPUTS = {  # of the target, in this order
    "input_ids": (INT64, [1, "S"]),
    "position_ids": (INT64, [1, "S"]),
    "attention_mask": (BOOL, [1, 1, "S", "C"]),
    "write_indices": (INT64, [1]),
    "logit_rows": (INT64, ["R"]),
    "past_key_values.0.key": CACHE,
    "past_key_values.0.value": CACHE,
    "past_key_values.1.key": CACHE,
    "past_key_values.1.value": CACHE,
}
OUTPUTS = {
    "logits": (FLOAT, ["R", 300]),
    "present.0.key": CACHE,
    "present.0.value": CACHE,
    "present.1.key": CACHE,
    "present.1.value": CACHE,
}
PRUNE_INPUTS = {
    "src_rows": (INT64, ["K"]),
    "write_indices": (INT64, [1]),
    **{name: CACHE for name in INPUTS if name.startswith("past")},
}
LLAMA_NODES = {  # two layers: two norms each and the last; query and key of each are rotated
    "RMSNormalization": 5,
    "RotaryEmbedding": 4,
    "TensorScatter": 4,
    "Attention": 2,
    "Cos": 1,
    "Sin": 1,
    "Gemm": 1,  # the tied head
    "MatMul": 8,  # query, key and value together, gate and up
    "Split": 4,
    "Gather": 2,  # tokens in, logit rows out
}
LEFT_OVER = {"Pow", "ReduceMean", "Sqrt", "Slice", "Neg", "GatherND", "Constant", "Identity"}


def tensors(values):
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


def test_inputs_and_outputs(exported):
    graph = exported.graph("target")
    assert tensors(graph.input) == INPUTS and list(tensors(graph.input)) == list(INPUTS)
    assert tensors(graph.output) == OUTPUTS


def test_inputs_and_outputs_of_the_prune_graph(exported):
    graph = exported.graph("target", "prune.onnx")
    assert tensors(graph.input) == PRUNE_INPUTS
    assert tensors(graph.output) == {n: t for n, t in OUTPUTS.items() if n != "logits"}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("file", ["model.onnx", "prune.onnx"])
def test_only_operators_of_opset_24(exported, role, file):
    model = exported.model(role, file)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("file", ["model.onnx", "prune.onnx"])
def test_caches_go_straight_from_input_to_output(exported, file):
    graph = exported.graph("target", file)
    scatters = {node.output[0]: node for node in graph.node if node.op_type == "TensorScatter"}
    for layer in range(2):
        for part in ("key", "value"):
            node = scatters[f"present.{layer}.{part}"]
            assert node.input[0] == f"past_key_values.{layer}.{part}"
            assert node.input[2] == "write_indices"
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes == {"axis": 2, "mode": b"linear"}


def test_attention_sees_the_given_mask_and_nothing_else(exported):
    for node in exported.graph("target").node:
        if node.op_type == "Attention":
            assert len(node.input) == 4 and node.input[3] == "attention_mask"
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes["is_causal"] == 0 and attributes["scale"] == pytest.approx(12**-0.5)


def test_norms_and_rotations_are_single_nodes(exported):
    counts = Counter(node.op_type for node in exported.graph("target").node)
    assert {name: counts[name] for name in LLAMA_NODES} == LLAMA_NODES
    assert not LEFT_OVER & set(counts)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_are_stored_once_with_the_graph(exported, role):
    graph = exported.graph(role)
    inside = [tensor for tensor in graph.initializer if not tensor.external_data]
    assert all(len(tensor.raw_data) < 256 for tensor in inside)
    layers = {"target": 2, "draft": 1}[role]
    attention, mlp, norms = 48 * (2 * 48 + 2 * 24), 3 * 48 * 80, 2 * 48
    embeddings = {"target": 1, "draft": 2}[role] * 300 * 48  # the draft's are not tied
    num_parameters = layers * (attention + mlp + norms) + 48 + embeddings
    size = (exported.config.output / role / "model.onnx.data").stat().st_size
    assert 4 * num_parameters * 0.99 < size < 4 * num_parameters * 1.05 + 16 * 4096


def test_nothing_of_this_machine_is_in_the_graph(exported):
    text = (exported.config.output / "target" / "model.onnx").read_bytes()
    assert b"/site-packages/" not in text and b"dsbd_export" not in text


def test_sliding_layers_read_the_sliding_mask(exported_others):
    graph = exported_others.graph("target")
    masks = [node.input[3] for node in graph.node if node.op_type == "Attention"]
    assert masks == ["attention_mask", "attention_mask_sliding"]
    assert list(tensors(graph.input))[2:4] == masks
    graph = exported_others.graph("draft")
    assert "attention_mask" not in tensors(graph.input)
    assert tensors(graph.input)["attention_mask_sliding"] == (BOOL, [1, 1, "S", "C"])


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("fixture", ["exported", "exported_others"])
def test_the_runtime_opens_it(request, fixture, role):
    output = request.getfixturevalue(fixture).config.output
    with load_causal_lm(
        open_bundle(output, verify=True), role, settings=EngineSettings(num_threads=1)
    ) as model:
        assert model.spec.vocab_size == 300
