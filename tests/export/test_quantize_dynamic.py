"""Products of int8 weights by rows that are quantized one by one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.passes.weighted_layers import find_linears
from dsbd_export.quantization.quantize import DynamicQuantizer
from tests.ort_sessions import cpu_session

NUM_IN, NUM_OUT = 64, 40


def quantized(shape: list[object], weight: np.ndarray) -> ir.Model:
    """A product of rows of this shape, (..., 64), whose weights and rows are quantized."""
    product = helper.make_node("MatMul", ["rows", "weight"], ["product"])
    # The last product of a graph is the head, whose rows may be none.
    head = helper.make_node("MatMul", ["product", "head"], ["logits"])
    numbers = {"weight": weight, "head": np.eye(NUM_OUT, dtype=np.float32)}
    graph = helper.make_graph(
        [product, head],
        "graph",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            for name in ("product", "logits")
        ],
        [numpy_helper.from_array(array, name) for name, array in numbers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    model.ir_version = 10
    found = ir.serde.deserialize_model(model)
    (linear, _head) = find_linears(found.graph)
    DynamicQuantizer(found.graph).quantize_linear(linear, is_shared=False)
    return found


def results_of(model: ir.Model, *rows: np.ndarray) -> list[np.ndarray]:
    session = cpu_session(model)
    return [session.run(["product"], {"rows": each})[0] for each in rows]


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(NUM_IN, NUM_OUT)).astype(np.float32)


def test_rows_by_axis_give_what_divided_rows_give(weight: np.ndarray) -> None:
    rows = np.random.default_rng(1).normal(size=(1, 7, NUM_IN)).astype(np.float32)
    by_axis, divided = quantized([1, "S", NUM_IN], weight), quantized(["B", "S", NUM_IN], weight)
    assert "DequantizeLinear" in operators(by_axis) and "Div" not in operators(by_axis)
    assert "Div" in operators(divided) and "DequantizeLinear" not in operators(divided)
    (found,), (other,) = results_of(by_axis, rows), results_of(divided, rows)
    step = np.abs(rows).max() * np.abs(weight).max() / 127  # of one rounding that differs
    np.testing.assert_allclose(found, other, rtol=0, atol=step)
    np.testing.assert_allclose(found, rows @ weight, rtol=0, atol=0.3)


def test_a_row_is_the_same_bits_alone_and_with_others(weight: np.ndarray) -> None:
    rows = np.random.default_rng(2).normal(size=(1, 13, NUM_IN)).astype(np.float32)
    rows[0, 5] *= 1e4
    model = quantized([1, "S", NUM_IN], weight)
    whole, *single = results_of(model, rows, *(rows[:, [i]] for i in range(13)))
    np.testing.assert_array_equal(whole, np.concatenate(single, axis=1))


def test_a_row_of_zeros_gives_zeros(weight: np.ndarray) -> None:
    rows = np.ones((1, 3, NUM_IN), np.float32)
    rows[0, 1] = 0.0
    for shape in ([1, "S", NUM_IN], ["B", "S", NUM_IN]):
        (found,) = results_of(quantized(shape, weight), rows)
        assert not found[0, 1].any()
        np.testing.assert_allclose(found[0, 0], weight.sum(0), rtol=0, atol=0.5)
        np.testing.assert_array_equal(found[0, 0], found[0, 2])
