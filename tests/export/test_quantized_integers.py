"""Integers and scales against the numbers they stand for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.quantization.quantize import channel_integers, channel_scales, quantize_graph
from dsbd_export.quantization.quantize_blockwise import (
    Blocks,
    block_integers,
    block_size,
    blocks_of,
    pack_nibbles,
)
from tests.ort_sessions import cpu_session


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
    weight = np.array([[-1, 4, 3.5, 0] + [0] * 28, [-4, 1, 0.5, 0] + [0] * 28], np.float32)
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
    weights = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("weight", (160, 90)), ("head", (90, 8)))
    }
    weights["weight"][:, silent_outputs] = 0
    rows, products, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "S", size])
        for name, size in (("rows", 160), ("products", 90), ("logits", 8))
    )
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["rows", "weight"], ["products"]),
            helper.make_node("MatMul", ["products", "head"], ["logits"]),  # in 8 bits
        ],
        "product", [rows], [products, logits],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24)]
    model = ir.serde.deserialize_model(
        helper.make_model(graph, opset_imports=opsets, ir_version=10)
    )
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
