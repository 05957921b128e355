"""Quantized products: which weights, their integers and scales, and rows one by one."""

import json
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.passes.weighted_layers import find_linears
from dsbd_export.quantization.quantize import (
    DynamicQuantizer,
    channel_integers,
    channel_scales,
    quantize_graph,
)
from dsbd_export.quantization.quantize_blockwise import (
    Blocks,
    block_integers,
    block_size,
    blocks_of,
    pack_nibbles,
)
from dsbd_export.quantization.row_forms import calibration_case
from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.family_checkpoints import FAMILY_CHECKPOINTS, VOCAB_SIZE, write_family_checkpoint
from tests.export.conftest import parsed_graph
from tests.export.gate import export_alone
from tests.exports import export_quietly
from tests.ort_sessions import cpu_session

HIDDEN_SIZE = 48
OF_ATTENTION = {"MatMul": 4}  # exact, in pieces: scores and values of two layers
OF_ROUTERS = ", 2 routers left as they are"
OF_EXPERTS = ", 2 routers and 4 expert products left as they are"
ROWS = [  # (checkpoint, quantization, number of products and what is said, operators of products)
    ("mixtral", "int8-dynamic", (9, OF_ROUTERS), {"MatMulInteger": 9, **OF_ATTENTION, "Gemm": 2}),
    ("mixtral", "int4", (5, OF_EXPERTS), {"MatMulNBits": 5, "MatMul": 4, "Gemm": 2}),
    # Biased products, and a tied head whose embedding sees the tokens through a Reshape.
    ("gpt2", "int8-dynamic", (9, ""), {"MatMulInteger": 9, **OF_ATTENTION}),
    ("gpt2", "int8-blocks", (9, ""), {"MatMulNBits": 9, **OF_ATTENTION}),
]


@pytest.mark.parametrize(("name", "quantize", "said", "products"), ROWS)
def test_what_is_quantized_passes_the_gate(name, quantize, said, products, captures, tmp_path):
    folder = write_family_checkpoint(name, tmp_path / "checkpoint")
    report: list[str] = []
    options = {"quantize": quantize, "max_context": FAMILY_CHECKPOINTS[name].max_context}
    graph = export_alone(folder, tmp_path, captures, report.append, **options)[2].graph
    number, others = said
    wanted = f"target: {number} products and 1 embeddings quantized{others}"
    assert any(line.split(";")[0] == wanted for line in report)
    found = Counter(
        node.op_type
        for node in graph.node
        if not any(name.startswith("equalize.rotation_") for name in node.input)
    )
    kinds = ("MatMulInteger", "MatMulNBits", "MatMul", "Gemm")
    assert {kind: found[kind] for kind in kinds if found[kind]} == products
    floats = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert not [t.name for t in floats if list(t.dims) == [VOCAB_SIZE, HIDDEN_SIZE]]


NUM_IN, NUM_OUT = 64, 40


def two_products(shape: str, weight: np.ndarray, head: np.ndarray) -> ir.Model:
    """Return products of rows: by a weight, and, last, of these by a head, whose rows may be none.

    shape: of the rows, such as "1,S,64".
    """
    text = f"""(float[{shape}] rows) => (float[A,S,N] products, float[A,S,M] logits) {{
        products = MatMul(rows, weight)
        logits = MatMul(products, head)
    }}"""
    return ir.from_proto(parsed_graph(text, weight=weight, head=head))


def quantized(shape: str, weight: np.ndarray) -> ir.Model:
    """A product of rows of this shape, (..., 64), whose weights and rows are quantized."""
    found = two_products(shape, weight, np.eye(NUM_OUT, dtype=np.float32))
    (linear, _head) = find_linears(found.graph)
    DynamicQuantizer(found.graph).quantize_linear(linear, is_shared=False)
    return found


def results_of(model: ir.Model, *rows: np.ndarray) -> list[np.ndarray]:
    session = cpu_session(model)
    return [session.run(["products"], {"rows": each})[0] for each in rows]


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.fixture
def weight():
    return np.random.default_rng(0).normal(size=(NUM_IN, NUM_OUT)).astype(np.float32)


def test_rows_by_axis_give_what_divided_rows_give(weight):
    rows = np.random.default_rng(1).normal(size=(1, 7, NUM_IN)).astype(np.float32)
    by_axis, divided = quantized(f"1,S,{NUM_IN}", weight), quantized(f"B,S,{NUM_IN}", weight)
    assert "DequantizeLinear" in operators(by_axis) and "Div" not in operators(by_axis)
    assert "Div" in operators(divided) and "DequantizeLinear" not in operators(divided)
    (found,), (other,) = results_of(by_axis, rows), results_of(divided, rows)
    step = np.abs(rows).max() * np.abs(weight).max() / 127  # of one rounding that differs
    np.testing.assert_allclose(found, other, rtol=0, atol=step)
    np.testing.assert_allclose(found, rows @ weight, rtol=0, atol=0.3)


def test_a_row_is_the_same_bits_alone_and_with_others(weight):
    rows = np.random.default_rng(2).normal(size=(1, 13, NUM_IN)).astype(np.float32)
    rows[0, 5] *= 1e4
    model = quantized(f"1,S,{NUM_IN}", weight)
    whole, *single = results_of(model, rows, *(rows[:, [i]] for i in range(13)))
    np.testing.assert_array_equal(whole, np.concatenate(single, axis=1))


def test_a_row_of_zeros_gives_zeros(weight):
    rows = np.ones((1, 3, NUM_IN), np.float32)
    rows[0, 1] = 0.0
    for shape in (f"1,S,{NUM_IN}", f"B,S,{NUM_IN}"):
        (found,) = results_of(quantized(shape, weight), rows)
        assert not found[0, 1].any()
        np.testing.assert_allclose(found[0, 0], weight.sum(0), rtol=0, atol=0.5)
        np.testing.assert_array_equal(found[0, 0], found[0, 2])


def test_channels_by_hand():
    weight = np.array([[1, -254], [127, 2], [0, 0]], np.float32)
    assert channel_scales(weight, 1).tolist() == [[2], [1], [1]]
    assert channel_integers(weight, 1).tolist() == [[0, -127], [127, 2], [0, 0]]
    assert channel_integers(weight.T, 0).tolist() == channel_integers(weight, 1).T.tolist()


def test_experts_have_scales_of_their_own():
    weight = np.random.default_rng(0).standard_normal((3, 8, 5)).astype(np.float32)
    scales, integers = channel_scales(weight, -2), channel_integers(weight, -2)
    assert scales.shape == (3, 1, 5)
    assert (np.abs(integers * scales - weight) <= scales / 2 * 1.0001).all()


def test_nibbles_by_hand():
    assert pack_nibbles(np.array([[3, 5, 15]], np.uint8)).tolist() == [[0x53, 0x0F]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("num_inputs", [32, 48, 70])
@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, False), (4, True), (8, False)])
def test_blocks_are_within_half_a_step(bits, is_symmetric, num_inputs, dtype):
    weight = np.random.default_rng(0).standard_normal((6, num_inputs)).astype(dtype)
    weight[0] = 0
    blocks = blocks_of(weight, bits, is_symmetric=is_symmetric)
    integers = block_integers(weight, blocks, bits)
    size = block_size(bits, num_inputs, is_symmetric=is_symmetric)
    assert size == (16 if is_symmetric else {4: 32, 8: 64}[bits])  # inputs: no multiple of 64
    assert integers.shape == (6, -(-num_inputs // size), size * bits // 8)
    values = dequantized(integers, blocks, bits)[:, :num_inputs]
    steps = np.repeat(abs(blocks.scales), size, axis=1)[:, :num_inputs]
    # The zero point of 4 bits is rounded, too: the ends of the range may be a step off. So may the
    # end of a symmetric range that lies opposite to its largest magnitude.
    assert (np.abs(values - weight) <= steps * (1.01 if bits == 4 else 0.501)).all()
    assert (values[0] == 0).all()


def test_symmetric_nibbles_by_hand():
    weight = np.array([[-1, 4, 3.5, 0] + [0] * 60, [-4, 1, 0.5, 0] + [0] * 60], np.float32)
    blocks = blocks_of(weight, 4, is_symmetric=True)
    assert blocks.scales.tolist() == [[-0.5, 0], [0.5, 0]]
    assert blocks.zero_points.tolist() == [[8, 8], [8, 8]]
    integers = block_integers(weight, blocks, 4)
    assert integers[:, 0, :2].tolist() == [[0x0A, 0x81], [0xA0, 0x89]]
    assert dequantized(integers, blocks, 4).tolist() == weight.tolist()


def dequantized(integers, blocks: Blocks, bits: int):
    if bits == 4:
        integers = np.stack([integers & 15, integers >> 4], axis=-1).reshape(
            *blocks.scales.shape, blocks.size
        )
    values = (integers - blocks.zero_points[..., None].astype(np.float32)) * blocks.scales[
        ..., None
    ]
    return values.reshape(len(values), -1)


def products_of(kind, num_threads, accuracy_level=None, silent_outputs=slice(0)):
    """Return a function of rows (S, 160): their products with a quantized weight, (S, 90)."""
    rng = np.random.default_rng(0)
    weight, head = (rng.standard_normal(shape, np.float32) for shape in ((160, 90), (90, 8)))
    weight[:, silent_outputs] = 0
    model = two_products("1,S,160", weight, head)  # the head is in 8 bits
    quantize_graph(model, kind, is_exact=True)
    node, _ = (node for node in model.graph if node.op_type == "MatMulNBits")
    assert node.attributes.get_int("bits") == int(kind.removeprefix("int"))
    if accuracy_level is not None:
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", accuracy_level)
    session = cpu_session(model, num_threads=num_threads)
    return lambda rows: session.run(["products"], {"rows": rows[None]})[0][0]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weight_only_products_of_a_row_are_the_same_bits_with_any_rows(kind):
    """At the level that is exported; at level 0 a single row takes another kernel.

    At 4 bits a lone row has another kernel on x86 without AVX-512 at any level: two rows are used.
    """
    rows = np.random.default_rng(1).standard_normal((70, 160)).astype(np.float32)
    wanted = products_of(kind, 1)(rows)
    for num_threads in (1, 2):
        products = products_of(kind, num_threads)
        for start, stop in ((0, 1), (69, 70), (5, 7), (5, 10), (3, 36)):
            np.testing.assert_array_equal(products(rows[start:stop]), wanted[start:stop])
    if kind == "int8":  # without another row
        at_level_0 = products_of(kind, 1, accuracy_level=0)
        assert (at_level_0(rows[:1]) != at_level_0(rows[:5])[:1]).mean() > 0.5


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_product_with_zeros_is_zero(kind):
    """ONNX Runtime adds 128 times the sum of a row's block, and takes it off again in fp32."""
    rows = 100 * np.random.default_rng(1).standard_normal((20, 160)).astype(np.float32)
    products = products_of(kind, 1, silent_outputs=slice(3, 9))(rows)
    assert not products[:, 3:9].any() and products[:, :3].all()


@pytest.fixture(scope="module")
def checkpoint(llama_folder):
    return open_checkpoint("target", llama_folder, ExportConfig(target="t", output="o"))


@pytest.fixture(scope="module")
def encode(llama_folder):
    tokenizer = Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def test_texts_have_equal_shares_each_as_a_prompt_begins(checkpoint, encode, tmp_path):
    long, short = "def path(x): " * 400, "class A: "
    (tmp_path / "a.txt").write_text(long)
    message = {"role": "user", "content": long}
    lines = ({"text": short}, {"messages": [message]}, {"text": ""})
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    case = calibration_case(checkpoint, [str(tmp_path)])
    parts = [encode(long)[:170], encode(short), encode(long)[:170]]
    wanted = [token for part in parts for token in part][: checkpoint.context_length]
    assert case.node_ids.tolist() == wanted
    assert case.rows.tolist() == list(range(len(wanted)))


def test_without_texts_it_is_ours(checkpoint):
    assert len(calibration_case(checkpoint, ()).node_ids) == min(512, checkpoint.context_length)


def test_a_file_without_text(checkpoint, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ExportError, match="has no text; give a file with some"):
        calibration_case(checkpoint, [str(tmp_path)])


def test_the_products_of_a_bundle_are_fitted_to_them(llama_folder, captures, tmp_path):
    """Other texts, other factors: the weights differ, the logits by rounding alone."""
    texts = tmp_path / "texts.txt"
    texts.write_text("path path path " * 300)
    found = {}
    for name, given in (("ours", ()), ("theirs", (str(texts),))):
        options = {"quantize": "int8-dynamic", "calibration_texts": given}
        bundle = export_quietly(captures, tmp_path / name, llama_folder, **options)
        found[name] = open_bundle(bundle).manifest.target.parity
    assert np.isfinite([parity.mean_kl for parity in found.values()]).all()
    files = [(tmp_path / name / "target").rglob("*.data") for name in found]
    ours, theirs = (b"".join(file.read_bytes() for file in sorted(each)) for each in files)
    assert ours and ours != theirs
