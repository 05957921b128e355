"""Bundles in every precision: what is in the graph, and what a row's result depends on."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import parity_limit
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.ort import ort_module
from tests.export.gate import bundle_of, check_parity, exported_target, references
from tests.ort_sessions import cpu_session
from tests.runtime.model_calls import logits_of

LAYERS, LINEARS = 2, 9  # of the target: four products a layer and the head
LOOSE = 10.0  # random weights of this size make distributions that no quantization keeps
FLOAT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


@pytest.fixture(scope="module")
def bundles(llama_folder, small_llama_folder, captures, tmp_path_factory):
    made = {}

    def bundle(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("precision") / "bundle"
            if options != {"dtype": "fp16"} and options != {"dtype": "bf16"}:
                options["max_kl"] = LOOSE
            pair = {"target": str(llama_folder), "draft": str(small_llama_folder)}
            config = ExportConfig(**pair, output=folder, **options)
            report: list[str] = []
            export_bundle(config, report=report.append, source_of=captures)
            made[key] = (folder, config, report)
        return made[key]

    return bundle


def graph_of(folder, role="target", file="model.onnx") -> onnx.GraphProto:
    return onnx.load(folder / role / file, load_external_data=False).graph


def operators(graph) -> Counter:
    return Counter(node.op_type for node in graph.node)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_caches_and_weights_have_the_precision_and_logits_are_fp32(bundles, dtype):
    folder, _, _ = bundles(dtype=dtype)
    wanted = FLOAT_TYPES[dtype]
    for file in ("model.onnx", "prune.onnx"):
        graph = graph_of(folder, file=file)
        caches = [v for v in (*graph.input, *graph.output) if "." in v.name]
        assert {value.type.tensor_type.elem_type for value in caches} == {wanted}
    graph = graph_of(folder)
    assert graph.output[0].name == "logits"
    assert graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert {t.data_type for t in graph.initializer if len(t.dims) == 2} == {wanted}
    entry = open_bundle(folder).manifest.target
    assert (entry.dtype, entry.caches[0].dtype, entry.quantization) == (dtype, dtype, "none")
    assert entry.parity.measure == "mean_kl" and 0 < entry.parity.mean_kl < entry.parity.limit


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_norms_and_rotations_are_fused_in_low_precision_too(bundles, exported, dtype):
    counts = operators(graph_of(bundles(dtype=dtype)[0]))
    assert counts["RMSNormalization"] == 5 and counts["RotaryEmbedding"] == 4
    assert not {"Pow", "ReduceMean", "Slice", "Neg"} & set(counts)
    counts["Cast"] -= 3  # cos, sin and logits
    assert +counts == operators(exported.graph("target"))


def test_the_cpu_runs_fp16_and_refuses_bf16(bundles):
    with load_causal_lm(
        open_bundle(bundles(dtype="fp16")[0]), "target", settings=EngineSettings(num_threads=1)
    ) as model:
        tokens = np.arange(3)
        logits = logits_of(model, tokens, tokens, np.tri(3, dtype=np.bool_), np.array([2]))
        assert np.isfinite(logits).all()
    with pytest.raises(ProviderError, match=r"is in bf16.*runs fp32, fp16; export with --dtype"):
        load_causal_lm(open_bundle(bundles(dtype="bf16")[0]), "target")


def test_the_prune_graph_of_bf16_moves_rows(bundles):
    """On the real file: ONNX Runtime's CPU provider can gather and scatter in bf16."""
    session = cpu_session(bundles(dtype="bf16")[0] / "target" / "prune.onnx")
    rng = np.random.default_rng(0)
    binding, caches = session.io_binding(), {}
    for layer in range(LAYERS):
        for part in ("key", "value"):
            cache = rng.integers(0, 30000, (1, 2, 8, 12)).astype(np.uint16)
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(cache, TensorProto.BFLOAT16)
            binding.bind_ortvalue_input(f"past_key_values.{layer}.{part}", value)
            binding.bind_ortvalue_output(f"present.{layer}.{part}", value)
            caches[layer, part] = (cache, cache.copy())
    binding.bind_cpu_input("src_rows", np.array([6, 3]))
    binding.bind_cpu_input("write_indices", np.array([1]))
    session.run_with_iobinding(binding)
    for found, before in caches.values():
        np.testing.assert_array_equal(found[:, :, 1:3], before[:, :, [6, 3]])
        np.testing.assert_array_equal(found[:, :, 3:], before[:, :, 3:])


QUANTIZED = [  # (options, product operator, how many)
    ({"quantize": "int8-dynamic"}, "MatMulInteger", LINEARS),
    ({"quantize": "int8-blocks"}, "MatMulNBits", LINEARS),
    ({"quantize": "int4"}, "MatMulNBits", LINEARS),
    ({"quantize": "int4", "dtype": "fp16"}, "MatMulNBits", LINEARS),
]


@pytest.mark.parametrize(("options", "operator", "count"), QUANTIZED)
def test_every_product_is_quantized(bundles, options, operator, count):
    folder, _, report = bundles(**options)
    graph = graph_of(folder)
    counts = operators(graph)
    is_exact = options["quantize"] in ("int8-dynamic", "int8-blocks")
    of_attention = 2 * LAYERS if is_exact else 0  # in pieces
    floats = [t for t in graph.initializer if t.data_type in FLOAT_TYPES.values()]
    rotations = {t.name for t in floats if t.name.startswith("equalize.rotation_")}
    num_rotated = sum(
        node.op_type == "MatMul" and node.input[1] in rotations for node in graph.node
    )
    assert counts[operator] == count and not counts["Gemm"]
    assert counts["MatMul"] == of_attention + num_rotated
    scales = [t.name for t in floats if len(t.dims) == 2 and t.name not in rotations]
    assert all(name.endswith(".scales") for name in scales)
    done = "target: 9 products and 1 embeddings quantized"
    assert any(line.startswith(done) for line in report)
    names = {"int8-blocks": "int8"}  # of the manifest
    form = "int4-symmetric" if options.get("dtype") == "fp16" else options["quantize"]
    form = names.get(form, form)
    assert open_bundle(folder).manifest.target.quantization == form
    if form == "int8-dynamic":  # products of the same rows share their integers
        # per layer: attention input, attention output, MLP input, MLP inside; and the head's
        assert counts["QuantizeLinear"] == 4 * LAYERS + 1
    num_inputs = {len(node.input) for node in graph.node if node.op_type == "MatMulNBits"}
    if operator == "MatMulNBits":  # zero points are a fourth input; the head has 8 bits
        assert num_inputs == ({3, 4} if form == "int4" else {3})


@pytest.mark.parametrize("quantize", ["int8-dynamic", "int8-blocks", "int4"])
def test_tied_weights_are_stored_once_in_8_bits(bundles, quantize):
    graph = graph_of(bundles(quantize=quantize)[0])
    of_vocabulary = [t for t in graph.initializer if 300 in t.dims and len(t.dims) > 1]
    integers = [t for t in of_vocabulary if t.data_type in (TensorProto.INT8, TensorProto.UINT8)]
    assert len(integers) == 1
    readers = [node.op_type for node in graph.node if integers[0].name in node.input]
    head = "Transpose" if quantize == "int8-dynamic" else "MatMulNBits"
    assert sorted(readers) == ["Gather", head]
    bits = {
        onnx.helper.get_attribute_value(attribute)
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "bits" and integers[0].name in node.input
    }
    assert bits <= {8}


@pytest.mark.parametrize("quantize", ["int8-dynamic", "int8-blocks", "int4"])
def test_a_missing_mask_is_found_in_every_precision(bundles, tmp_path, quantize):
    folder, config, _ = bundles(quantize=quantize)
    checkpoint = exported_target(config, folder)
    wanted = references(load_model(checkpoint), checkpoint)
    limit = parity_limit(replace(config, max_kl=None))
    model = onnx.load(folder / "target" / "model.onnx")
    if quantize != "int4":  # exact attention, in pieces
        where = next(node for node in model.graph.node if node.op_type == "Where")
        where.input[2] = where.input[1]
    else:
        next(node for node in model.graph.node if node.op_type == "Attention").input.pop()
    (tmp_path / "target").mkdir()
    onnx.save(model, tmp_path / "target" / "model.onnx")
    shutil.copy(folder / "target" / "prune.onnx", tmp_path / "target")
    with pytest.raises(ExportError, match=r"mean_kl\) in case"):
        check_parity(tmp_path / "target", checkpoint, wanted, limit, config=config)


def test_the_engine_of_parity_takes_no_rows(bundles):
    folder, config, _ = bundles(quantize="int8-dynamic")
    checkpoint = exported_target(config, folder)
    case = references(load_model(checkpoint), checkpoint)[0].case
    with parity_engine(bundle_of(folder / "target", checkpoint, config), "target") as engine:
        assert engine.logits(replace(case, rows=np.zeros(0, np.int64))).shape == (0, 300)


def test_the_engine_of_parity_lets_no_product_saturate(bundles, monkeypatch):
    """As the runtime does, on processors on which products of uint8 and int8 would."""
    folder, config, _ = bundles(quantize="int8-dynamic")
    checkpoint = exported_target(config, folder)
    monkeypatch.setattr(ort_module, "saturates_int8_products", lambda: True)
    with parity_engine(bundle_of(folder / "target", checkpoint, config), "target") as engine:
        options = engine.model._session._engine.get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL


@pytest.mark.parametrize("quantize", [pytest.param("int8-blocks", marks=pytest.mark.slow), "int4"])
def test_blocks_lose_no_more_in_fp16_than_in_fp32(bundles, quantize):
    """Their scales in fp16 must be known when the engine packs; the gate found a KL of 1 once."""
    lost = [
        open_bundle(bundles(dtype=dtype, quantize=quantize)[0]).entry("target").parity.mean_kl
        for dtype in ("fp32", "fp16")
    ]
    assert 0 < lost[1] < 1.5 * lost[0]
