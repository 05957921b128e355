"""The exported graphs: the contract, limits and updates in place; forms with the same logits."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto

from dsbd_export.capture.graph_checks import lint_for_tensorrt
from dsbd_export.config import HIDDEN
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.ort.ort_module import LOG_WARNINGS
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import Exported, export
from tests.export.gate import export_alone
from tests.ort_sessions import cpu_session
from tests.runtime.model_calls import logits_of, prefix_and_tree

INT64, BOOL, FLOAT = TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT
ROWS = ("0.key", "0.value", "1.key", "1.value")
CACHE = (FLOAT, [1, 2, "C", 12])

INPUTS = {  # of the target, in this order
    "input_ids": (INT64, [1, "S"]),
    "position_ids": (INT64, [1, "S"]),
    "attention_mask": (BOOL, [1, 1, "S", "C"]),
    "write_indices": (INT64, [1]),
    "logit_rows": (INT64, ["R"]),
    **{f"past_key_values.{rows}": CACHE for rows in ROWS},
}
OUTPUTS = {"logits": (FLOAT, ["R", 300]), **{f"present.{rows}": CACHE for rows in ROWS}}
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
    graph, prune = exported.graph("target"), exported.graph("target", "prune.onnx")
    assert tensors(graph.input) == INPUTS and list(tensors(graph.input)) == list(INPUTS)
    assert tensors(graph.output) == OUTPUTS
    assert tensors(prune.input) == PRUNE_INPUTS
    assert tensors(prune.output) == {n: t for n, t in OUTPUTS.items() if n != "logits"}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("file", ["model.onnx", "prune.onnx"])
def test_only_operators_of_opset_24(exported, role, file):
    model = exported.model(role, file)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}


def test_attention_sees_the_given_mask_and_norms_and_rotations_are_single_nodes(exported):
    for node in exported.graph("target").node:
        if node.op_type == "Attention":
            assert len(node.input) == 4 and node.input[3] == "attention_mask"
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes["is_causal"] == 0 and attributes["scale"] == pytest.approx(12**-0.5)
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
    text = (exported.config.output / role / "model.onnx").read_bytes()
    assert b"/site-packages/" not in text and b"dsbd_export" not in text  # of this machine
    size = (exported.config.output / role / "model.onnx.data").stat().st_size
    assert 4 * num_parameters * 0.99 < size < 4 * num_parameters * 1.05 + 16 * 4096


CAPACITY = 16
MOVES = {"src_rows": np.array([9, 3, 12, 4]), "write_indices": np.array([3])}
NOT_IN_PLACE = "in-place optimization not activated"


def new_caches():
    rng = np.random.default_rng(0)
    return {rows: rng.standard_normal((1, 2, CAPACITY, 12), dtype=np.float32) for rows in ROWS}


def session_of(exported, file):
    path = exported.config.output / "target" / file
    return cpu_session(path, log_severity=LOG_WARNINGS)


def run(session, inputs, caches, *, in_place):
    """Run with every output bound, the caches' to their own memory if ``in_place``."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    if "logits" in {output.name for output in session.get_outputs()}:
        binding.bind_output("logits")
    for name, cache in caches.items():
        value = ort.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(f"past_key_values.{name}", value)
        if in_place:
            binding.bind_ortvalue_output(f"present.{name}", value)
        else:
            binding.bind_output(f"present.{name}")
    session.run_with_iobinding(binding)
    return [output.numpy() for output in binding.get_outputs()]


def step_inputs(num_nodes, logit_rows, first_row=0):
    mask = np.zeros((1, 1, num_nodes, CAPACITY), np.bool_)
    mask[0, 0, :, : first_row + num_nodes] = np.tri(num_nodes, first_row + num_nodes, first_row)
    positions = np.arange(first_row, first_row + num_nodes)
    return {
        "input_ids": positions[None] + 5,
        "position_ids": positions[None],
        "attention_mask": mask,
        "write_indices": np.array([first_row]),
        "logit_rows": np.array(logit_rows, np.int64),
    }


@pytest.mark.parametrize("num_nodes", [1, 2, CAPACITY])
@pytest.mark.parametrize("num_rows", [0, 1])
def test_calls_with_no_logit_rows_and_with_one_node(exported, num_nodes, num_rows):
    inputs = step_inputs(num_nodes, [num_nodes - 1] * num_rows)
    caches = new_caches()
    before = {name: cache.copy() for name, cache in caches.items()}
    logits = run(session_of(exported, "model.onnx"), inputs, caches, in_place=True)[0]
    assert logits.shape == (num_rows, 300) and logits.dtype == np.float32
    for name, cache in caches.items():
        is_new = (cache != before[name])[0].transpose(1, 0, 2).reshape(CAPACITY, -1)
        assert is_new[:num_nodes].all() and not is_new[num_nodes:].any()


def test_logit_rows_choose_and_order_the_rows(exported):
    session = session_of(exported, "model.onnx")
    every = run(session, step_inputs(4, [0, 1, 2, 3]), new_caches(), in_place=True)[0]
    some = run(session, step_inputs(4, [3, 1, 1]), new_caches(), in_place=True)[0]
    np.testing.assert_allclose(some, every[[3, 1, 1]], atol=1e-5)


@pytest.mark.parametrize("file", ["model.onnx", "prune.onnx"])
def test_bound_to_one_buffer_the_caches_are_not_copied(exported, capfd, file):
    """ONNX Runtime warns when a scatter has to copy its cache: the proof that it does not here."""
    inputs = step_inputs(2, [1]) if file == "model.onnx" else MOVES
    session = session_of(exported, file)
    run(session, inputs, new_caches(), in_place=False)
    assert NOT_IN_PLACE in capfd.readouterr().err
    run(session, inputs, new_caches(), in_place=True)
    assert NOT_IN_PLACE not in capfd.readouterr().err


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
