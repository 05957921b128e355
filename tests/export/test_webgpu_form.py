"""The form for WebGPU on the CPU: its operators, heads, precisions, tables and prune graph."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from dsbd_export.capture.cache_graphs import write_prune_graph
from dsbd_export.capture.forest_graph import ExportContract
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import HIDDEN, ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.parts.head import append_topk_head
from dsbd_export.parts.rows import EVERY_ROW
from dsbd_export.passes.webgpu_graph import read_rows_of_sources, use_webgpu_operators
from dsbd_export.passes.webgpu_operators import LACKING, replace_operators
from dsbd_export.pipeline import export_bundle, export_model
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.attention.cache_entries import AttentionRows, parts_of, past_name
from scripts.family_checkpoints import write_family_checkpoint
from scripts.path_ways import PathEngine, count_differing
from tests.export.conftest import export, parsed_graph
from tests.export.feature_checkpoints import opened, write_flat, written
from tests.export.gate import export_alone
from tests.export.test_graph_contract import tensors
from tests.export.test_topk_head import assert_best
from tests.ort_sessions import cpu_session
from tests.runtime.model_calls import logits_of, prefix_and_tree

NUM_TOP = 8
LOOSE = 10.0  # random weights make distributions that no quantization keeps


def operators(graph) -> Counter[str]:
    found = Counter(node.op_type for node in graph.node)
    assert not LACKING & found.keys()
    return found


@pytest.fixture(scope="module")
def for_webgpu(exported, captures, tmp_path_factory):
    """The pair of ``exported`` with top-k heads; the draft proposes half of the tokens."""
    options = {"form": "webgpu", "logits": f"topk:{NUM_TOP}", "draft_vocab": 150}
    output = tmp_path_factory.mktemp("webgpu") / "bundle"
    return export(replace(exported.config, output=output, **options), captures)


def test_nodes_inputs_and_outputs(for_webgpu, exported):
    """Layers share tables, masks and the places of new rows."""
    graph, portable = for_webgpu.graph("target"), exported.graph("target")
    found = operators(graph)
    assert tensors(graph.input) == tensors(portable.input)
    assert [*tensors(graph.output).items()][3:] == [*tensors(portable.output).items()]
    assert [found[name] for name in ("ScatterElements", "Softmax", "Where", "Tile")] == [4, 2, 1, 1]
    assert (found["CumSum"], found["RotaryEmbedding"]) == (1, 4)
    line = "2 attention nodes grouped, 0 masks are added, 2 tables of angles"
    assert any(f"target: {line}" in each for each in for_webgpu.report)
    operators(for_webgpu.graph("draft")), operators(for_webgpu.graph("target", "prune.onnx"))


def test_heads_give_what_the_portable_ones_give(for_webgpu, exported):
    for role, num_tokens in (("target", 300), ("draft", 150)):
        with load_causal_lm(open_bundle(exported.config.output), role) as model:
            wanted = [logits_of(model, *call)[:, :num_tokens] for call in prefix_and_tree()]
        with load_causal_lm(open_bundle(for_webgpu.config.output), role) as model:
            found = [logits_of(model, *call) for call in prefix_and_tree()]
        for rows, logits in zip(found, wanted, strict=True):
            assert_best(rows, logits, NUM_TOP, atol=2e-5)


def test_the_log_sum_of_large_logits_does_not_overflow(tmp_path):
    file = tmp_path / "model.onnx"
    text = "(float[R, V] x) => (float[R, V] logits) {logits = Identity(x)}"
    onnx.save(parsed_graph(text), file)
    append_topk_head(file, 2, for_webgpu=True)
    logits = np.array([[500, 499, -900], [-700, -np.inf, -701]], np.float32)
    found = cpu_session(file).run(["logsumexp"], {"x": logits})[0]
    np.testing.assert_allclose(found, np.array([500, -700]) + np.log1p(np.exp(-1)), rtol=1e-6)


def test_a_feature_draft(targets, captures, tmp_path):
    folder = written(tmp_path, write_flat, {}, (), {})
    options, _, draft = opened(targets["llama"], folder)
    options = replace(options, logits="full", form="webgpu")
    entry = export_model(draft, tmp_path, options, silent, captures)
    assert entry.features is not None and entry.parity.max_abs_error < 5e-5
    operators(onnx.load(tmp_path / "draft" / "model.onnx", load_external_data=False).graph)


def test_tables_hold_the_angles_of_the_last_position(exported):
    """In a context of 131,072 an angle is large; the checkpoint computes it in fp32 too."""
    context_length = 2**17
    model = ir.load(exported.config.output / "target" / "model.onnx")
    use_webgpu_operators(model, context_length)
    rotary = next(node for node in model.graph if node.op_type == "RotaryEmbedding")
    rows = [value.producer().inputs[0].const_value.numpy()[0, -1] for value in rotary.inputs[1:]]
    checkpoint, _ = open_pair(exported.config)
    last = torch.tensor([[context_length - 1]])
    wanted = load_model(checkpoint).model.rotary_emb(torch.zeros(1), last)
    for found, angles in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(found, angles[0, 0, : len(found)].numpy(), atol=1e-6)


ATTENTION = """
           (float16[1, 2, S, 4] q, float16[1, 2, C, 4] k, float16[1, 2, C, 4] v,
            bool[1, 1, S, C] mask, int64[1, S] position_ids) => (float16[1, 2, S, 4] y)
    {y = Attention <scale = 1.0> (q, k, v, mask)}
"""


def test_scores_near_the_limit_of_fp16_stay_numbers():
    """A hidden row's score of -6e4 less 3e4 is -inf in fp16, which weighs nothing."""
    portable = parsed_graph(ATTENTION)
    model = ir.from_proto(portable)
    use_webgpu_operators(model, 16)
    key = np.zeros((1, 2, 5, 4), np.float16)
    key[0, :, :, 0] = [-6e4, 2e4, -10, 3, 5]
    value = np.random.default_rng(0).standard_normal(key.shape).astype(np.float16)
    mask = np.array([[False, False, True, True, True], [False, False, True, False, False]])
    feeds = {"q": np.eye(2, 4, dtype=np.float16)[None, None, [0, 0]].repeat(2, 1)}
    feeds |= {"k": key, "v": value, "mask": mask[None, None]}
    feeds["position_ids"] = np.zeros((1, 2), np.int64)
    wanted, found = (cpu_session(each).run(["y"], feeds)[0] for each in (portable, model))
    assert HIDDEN - 6e4 < float(np.finfo(np.float16).min) and np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    np.testing.assert_array_equal(found[0, :, 1], value[0, :, 2])


PRECISIONS = [  # (options, the kind in the manifest)
    ({"dtype": "fp16"}, "none"),
    ({"quantize": "int8"}, "int8"),
    ({"quantize": "int4"}, "int4"),
    ({"quantize": "int4", "dtype": "fp16"}, "int4-symmetric"),
]


@pytest.mark.parametrize(("options", "kind"), PRECISIONS, ids=str)
def test_precisions(options, kind, small_llama_folder, captures, tmp_path):
    """Blocks of weights are multiplied with rows as they are, on the CPU as well."""
    is_quantized = "quantize" in options
    options = {**options, "max_kl": LOOSE if is_quantized else None}
    _, entry, model = export_alone(small_llama_folder, tmp_path, captures, form="webgpu", **options)
    assert entry.quantization == kind and entry.bit_exact is False
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 5 * is_quantized and operators(model.graph)
    attributes = [each for node in products for each in node.attribute]
    levels = {each.i for each in attributes if each.name == "accuracy_level"}
    assert levels == ({1} if is_quantized else set())


def test_exact_attention_keeps_the_bits_of_a_path(llama_folder, captures, tmp_path):
    _, entry, model = export_alone(
        llama_folder, tmp_path, captures, form="webgpu", attention="exact"
    )
    assert (entry.bit_exact, entry.parity.measure) == ("observed", "mean_kl")
    assert operators(model.graph)["Floor"] == 6  # weights, shares and values of two layers
    engine = PathEngine(tmp_path / "target" / "model.onnx", entry)
    assert count_differing(engine, num_tokens=90, num_ways=8).num_other_ways == 0


SUM = """(float[R, C] w) => (float[R, 1] y) {
    wide = Cast <to = 11> (w)
    total = ReduceSum <keepdims = 1> (wide, axes)
    y = Cast <to = 1> (total)
}"""


@pytest.mark.parametrize("num_rows", [20_000, 2**17])
def test_sums_of_long_contexts_have_the_bits_that_double_gives(num_rows):
    model = ir.from_proto(parsed_graph(SUM, axes=np.array([-1])))
    assert replace_operators(model, num_rows) == 1
    weights = np.random.default_rng(0).integers(0, 2**14 + 1, (3, num_rows)).astype(np.float32)
    weights[0] = 2**14
    found = cpu_session(model).run(["y"], {"w": weights})[0]
    wanted = weights.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


def test_longer_contexts_have_no_exact_sums():
    model = ir.from_proto(parsed_graph(SUM, axes=np.array([-1])))
    with pytest.raises(
        ExportError, match=r"131072 rows at most, .* 131073; use max_context=131072"
    ):
        replace_operators(model, 2**17 + 1)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("LogSoftmax (x)", "LogSoftmax"),
        ("Cast <to = 11> (x)", "Cast to double"),
        ("Sin (x)", "Sin"),
    ],
)
def test_what_the_plug_in_lacks_is_refused_by_name(operator, name):
    text = f"(float[R, C] x, int64[1, S] position_ids) => (float[R, C] y) {{y = {operator}}}"
    model = ir.from_proto(parsed_graph(text))
    with pytest.raises(ExportError, match=f"no operators in place of {name}; use form='portable'"):
        use_webgpu_operators(model, 16)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5-wrapper", "falcon_h1"])
def test_models_without_this_form_are_refused_before_any_work(name, tmp_path):
    target = str(write_family_checkpoint(name, tmp_path / "checkpoint"))
    config = ExportConfig(target=target, output=tmp_path / "bundle", form="webgpu")
    lines: list[str] = []
    words = "which has no convolutions and recurrences.*; use form='portable'"
    with pytest.raises(ExportError, match=words):
        export_bundle(config, report=lines.append)
    assert lines == ["reading the checkpoints"] and not config.output.exists()


def moved(session, src_rows, first, past, sources):
    """Run a prune graph on caches and sources by the names of the caches, in place."""
    binding = session.io_binding()
    binding.bind_cpu_input("src_rows", np.array(src_rows))
    binding.bind_cpu_input("write_indices", np.array([first]))
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in past.items()}
    for name, value in values.items():
        source = sources[name]
        read = value if source is past[name] else ort.OrtValue.ortvalue_from_numpy(source)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_input(name.replace("past_key_values", "source"), read)
        binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
    session.run_with_iobinding(binding)


MOVES = [  # (rows, first row)
    (np.arange(40) + 2, 1),  # onto rows that are moved themselves
    (np.arange(40)[::-1], 0),
    (np.arange(35), 20),
    (np.array([9, 3, 12, 4]), 3),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_prune_graph_moves_rows_in_place_and_into_larger_caches(dtype, tmp_path):
    """The new caches keep what they held after the rows that are copied."""
    name = {np.float32: "fp32", np.float16: "fp16"}[dtype]
    layers = [
        AttentionRows(layer=layer, num_heads=layer + 1, key_width=8, value_width=6, dtype=name)
        for layer in range(2)
    ]
    contract = ExportContract(spaces=(EVERY_ROW,), caches=tuple((e, EVERY_ROW) for e in layers))
    write_prune_graph(contract, file := tmp_path / "prune.onnx")
    read_rows_of_sources(file)
    operators(onnx.load(file).graph)
    session, rng = cpu_session(file), np.random.default_rng(0)

    def caches(capacity):
        shapes = {past_name(e.layer, part): e.shape(part, capacity) for e, part in parts_of(layers)}
        return {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}

    for rows, first in MOVES:
        past = caches(64)
        before = {name: array.copy() for name, array in past.items()}
        moved(session, rows, first, past, past)
        for name, found in past.items():
            before[name][:, :, first : first + len(rows)] = before[name][:, :, rows]
            np.testing.assert_array_equal(found, before[name])
    old, new = caches(64), caches(128)
    kept, before = ({n: array.copy() for n, array in each.items()} for each in (old, new))
    moved(session, np.arange(50), 0, new, old)
    for name, found in new.items():
        np.testing.assert_array_equal(old[name], kept[name])
        np.testing.assert_array_equal(found[:, :, :50], old[name][:, :, :50])
        np.testing.assert_array_equal(found[:, :, 50:], before[name][:, :, 50:])
