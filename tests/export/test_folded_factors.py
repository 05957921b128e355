"""Factors of attention in the weights of products: the same in fp32, and fewer nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.passes.weighted_layers import find_embeddings, find_linears
from dsbd_export.quantization.equalize import Equalizer
from dsbd_export.quantization.folded_factors import fold_factors
from dsbd_export.quantization.product_rows import RowsOfProducts, key_of, rows_of
from dsbd_export.quantization.quantize import quantize_graph
from dsbd_export.quantization.row_forms import FormChoice
from tests.ort_sessions import cpu_session

HEADS, KEY_HEADS, DEPTH = 4, 2, 16
WIDTH = HEADS * DEPTH
COLUMNS = (HEADS + 2 * KEY_HEADS) * DEPTH
OUTPUTS = ("query", "key", "integers", "y")


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


BEHIND = np.exp(draw(7, 1, KEY_HEADS, 1, DEPTH) / 4)  # a number a channel of each key head


def layer(
    *,
    perm: tuple[int, ...] = (0, 2, 1, 3),
    behind: NDArray[np.float32] = BEHIND,
    outputs: tuple[str, ...] = OUTPUTS,
    is_o_shared: bool = False,
    is_bias_added: bool = False,
) -> ir.Model:
    """Return a product of query, key and value with the factors of exact attention, and one behind.

    What attention makes of them is an input, (1, KEY_HEADS, 2 * S, DEPTH).
    """
    numbers = {
        "qkv": draw(0, COLUMNS, WIDTH),
        "bias": draw(1, COLUMNS),
        "v_bias": draw(9, KEY_HEADS * DEPTH),
        "o": draw(2, WIDTH, WIDTH),
        "sizes": np.array([HEADS * DEPTH, KEY_HEADS * DEPTH, KEY_HEADS * DEPTH]),
        "flat": np.array([-1, WIDTH]),
        "all": np.array([1, -1, COLUMNS]),
        "query_heads": np.array([1, -1, HEADS, DEPTH]),
        "key_heads": np.array([1, -1, KEY_HEADS, DEPTH]),
        "scale": np.array(0.3, np.float32),
        "per_value": np.exp(draw(3, 1, KEY_HEADS, 1, DEPTH)) * np.float32(50),
        "behind": behind,
        "group": np.array([1, KEY_HEADS, -1, DEPTH]),
        "ungroup": np.array([1, HEADS, -1, DEPTH]),
        "joined": np.array([1, -1, WIDTH]),
    }
    node = helper.make_node
    nodes = [
        node("Reshape", ["rows", "flat"], ["flat_rows"]),
        node(
            "Gemm",
            ["flat_rows", "qkv", *([] if is_bias_added else ["bias"])],
            ["flat_columns"],
            transB=1,
        ),
        node("Split", ["flat_columns", "sizes"], ["q", "k", "v"], axis=-1),
        node("Reshape", ["q", "query_heads"], ["q_heads"]),
        node("Transpose", ["q_heads"], ["q_turned"], perm=[0, 2, 1, 3]),
        node("RotaryEmbedding", ["q_turned", "cos", "sin"], ["q_rotated"]),
        node("Mul", ["q_rotated", "scale"], ["q_scaled"]),
        node("Reshape", ["q_scaled", "group"], ["query"]),
        node("Reshape", ["k", "key_heads"], ["k_heads"]),
        node("Transpose", ["k_heads"], ["key"], perm=[0, 2, 1, 3]),
        *([node("Add", ["v_bias", "v"], ["v_sum"])] if is_bias_added else []),
        node("Reshape", ["v_sum" if is_bias_added else "v", "key_heads"], ["v_heads"]),
        node("Transpose", ["v_heads"], ["v_turned"], perm=perm),
        node("Mul", ["v_turned", "per_value"], ["v_scaled"]),
        node("Abs", ["v_scaled"], ["integers"]),
        node("Mul", ["attended", "behind"], ["scaled"]),
        node("Reshape", ["scaled", "ungroup"], ["by_head"]),
        node("Transpose", ["by_head"], ["by_row"], perm=[0, 2, 1, 3]),
        node("Reshape", ["by_row", "joined"], ["o_rows"]),
        node("MatMul", ["o_rows", "o"], ["o_result"]),
        node("MatMul", ["o_result", "o"] if is_o_shared else ["o_result", "last"], ["y"]),
    ]
    numbers["last"] = draw(4, WIDTH, WIDTH)
    shapes: dict[str, list[object]] = {
        "query": [1, KEY_HEADS, "T", DEPTH],
        "key": [1, KEY_HEADS, "S", DEPTH],
        "integers": [1, KEY_HEADS, "S", DEPTH],
        "y": [1, "S", WIDTH],
        "q": ["S", HEADS * DEPTH],
        "k": ["S", KEY_HEADS * DEPTH],
        "v": ["S", KEY_HEADS * DEPTH],
        "v_sum": ["S", KEY_HEADS * DEPTH],
        "v_turned": [1, KEY_HEADS, "S", DEPTH],
        "by_head": [1, HEADS, "S", DEPTH],
        "o_rows": [1, "S", WIDTH],
        "rows": [1, "S", WIDTH],
        "cos": [1, "S", DEPTH // 2],
        "sin": [1, "S", DEPTH // 2],
        "attended": [1, KEY_HEADS, "T", DEPTH],
    }
    info = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    }
    inputs = ("rows", "cos", "sin", "attended")
    used = {name for each in nodes for name in each.input}
    graph = helper.make_graph(
        nodes,
        "layer",
        [info[name] for name in inputs],
        [info[name] for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in numbers.items() if name in used],
        value_info=[
            info[name]
            for name in info
            if name not in (*inputs, *outputs) and (is_bias_added or name != "v_sum")
        ],
    )
    opset = [helper.make_opsetid("", 24)]
    return ir.serde.deserialize_model(helper.make_model(graph, opset_imports=opset, ir_version=10))


def feeds(num_rows: int = 5) -> dict[str, NDArray[np.float32]]:
    """Return inputs of which fewer rows are the first ones of more."""
    attended = draw(6, 40, KEY_HEADS, HEADS // KEY_HEADS, DEPTH)[:num_rows]
    return {
        "rows": draw(5, 1, 40, WIDTH)[:, :num_rows],
        "cos": np.cos(draw(8, 1, 40, DEPTH // 2))[:, :num_rows],
        "sin": np.sin(draw(8, 1, 40, DEPTH // 2))[:, :num_rows],
        "attended": attended.transpose(1, 2, 0, 3).reshape(1, KEY_HEADS, -1, DEPTH),
    }


def run(model: ir.Model, num_rows: int = 5) -> list[NDArray[np.float32]]:
    found = cpu_session(model).run(list(OUTPUTS), feeds(num_rows))
    return [np.asarray(output) for output in found]


def seen_behind() -> RowsOfProducts:
    """Return the rows of the product behind attention, as its module would show them."""
    scaled = (feeds(40)["attended"] * BEHIND).reshape(HEADS, 40, DEPTH)
    rows = scaled.transpose(1, 0, 2).reshape(40, WIDTH)
    return {key_of(draw(2, WIDTH, WIDTH).T): rows_of(rows)}


def folded(model: ir.Model, seen: RowsOfProducts) -> int:
    """Fold the factors of a graph as they are, and return how many."""
    graph = model.graph
    equalizer = Equalizer(graph, find_linears(graph), find_embeddings(graph), seen, FormChoice())
    return fold_factors(graph, equalizer)


def num_factors(model: ir.Model) -> int:
    return sum(node.op_type == "Mul" for node in model.graph)


@pytest.mark.parametrize("is_bias_added", [False, True])
def test_a_graph_without_its_factors_computes_the_same(is_bias_added: bool) -> None:
    wanted = run(layer(is_bias_added=is_bias_added))
    model = layer(is_bias_added=is_bias_added)
    assert num_factors(model) == 3 and folded(model, seen_behind()) == 3
    assert num_factors(model) == 0
    for found, each in zip(run(model), wanted, strict=True):
        np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-5 * np.abs(each).max())


UNEVEN = np.exp(draw(7, 1, KEY_HEADS, 1, DEPTH) * 6)


@pytest.mark.parametrize(
    ("options", "seen", "number"),
    [
        ({}, {}, 2),  # no row was seen by which to judge what the product behind loses
        ({"behind": UNEVEN}, seen_behind(), 2),  # it would lose too much
        ({"behind": BEHIND[:, :1, :, :1]}, seen_behind(), 2),  # a number, with nothing before it
        ({"is_o_shared": True}, seen_behind(), 2),  # another product reads its weight
        ({"outputs": (*OUTPUTS, "o_rows")}, seen_behind(), 2),  # the host reads the rows
        ({"outputs": (*OUTPUTS, "v_turned")}, seen_behind(), 2),
        ({"outputs": (*OUTPUTS, "v")}, seen_behind(), 2),
    ],
)
def test_factors_that_stay(options: dict[str, object], seen: RowsOfProducts, number: int) -> None:
    model = layer(**options)  # type: ignore[arg-type]  # a table
    wanted = run(model)
    assert folded(model, seen) == number and num_factors(model) == 3 - number
    for found, each in zip(run(model), wanted, strict=True):
        np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-5 * np.abs(each).max())


def test_in_int8_a_row_does_not_depend_on_others() -> None:
    model = layer()
    done = quantize_graph(model, "int8-dynamic", is_exact=True, rows=seen_behind())
    assert done.equalized.num_folded == 3 and "3 factors of attention folded" in str(done)
    whole = run(model, 33)
    for size in (1, 2, 20):
        for name, found, each in zip(OUTPUTS, run(model, size), whole, strict=True):
            if name == "query":  # (1, KEY_HEADS, 2 * S, DEPTH)
                each = each.reshape(1, HEADS, -1, DEPTH)
                found = found.reshape(1, HEADS, -1, DEPTH)
            rows = each[:, :size] if name == "y" else each[:, :, :size]
            np.testing.assert_array_equal(found, rows)
    for found, each in zip(whole, run(layer(), 33), strict=True):
        assert np.square(found - each).mean() < 1e-3 * np.square(each).mean()
