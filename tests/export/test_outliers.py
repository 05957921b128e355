"""Outlier channels: found in rows, kept in fp32 beside int8, and nothing changes without them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from dsbd_export.outliers import NUMBERS, key_of, observed_outliers, outliers_of
from dsbd_export.quantize import quantize_graph

NUM_IN, NUM_OUT = 256, 96
LOUD = (3, 40, 41, 200)


def rows(loud: tuple[int, ...] = LOUD, num_rows: int = 64) -> torch.Tensor:
    """Return normal numbers, (num_rows, NUM_IN), with channels that are a hundred times larger."""
    found = torch.randn(num_rows, NUM_IN, generator=torch.Generator().manual_seed(0))
    found[:, list(loud)] *= 100
    return found


def test_loud_channels_are_found() -> None:
    found = outliers_of(rows())
    assert {*LOUD} <= {*found.tolist()} and len(found) == NUMBERS[1]
    assert (np.diff(found) > 0).all()


def test_ordinary_rows_and_tails_have_none() -> None:
    assert not len(outliers_of(rows(loud=())))
    tail = torch.from_numpy(np.random.default_rng(0).laplace(size=(2048, NUM_IN)) ** 3).float()
    assert not len(outliers_of(tail))
    assert not len(outliers_of(torch.zeros(4, NUM_IN)))
    assert not len(outliers_of(rows()[:, :12]))  # too few channels to keep any


def test_products_are_observed_by_their_weights() -> None:
    model = nn.Sequential(nn.Linear(NUM_IN, NUM_OUT), nn.Linear(NUM_OUT, 8))
    with torch.no_grad(), observed_outliers(model) as found:
        model(rows()[None])
    weight = model[0].weight.detach().numpy()
    assert {*LOUD} <= {*found[key_of(weight[:1])].tolist()}
    assert len(found) == 2 and not any(m._forward_pre_hooks for m in model)


def quantized(weight: np.ndarray, outliers: dict[bytes, np.ndarray]) -> onnx.ModelProto:
    """Return the product with a weight (in, out), and a head behind it, in int8-dynamic."""
    head = np.random.default_rng(2).normal(size=(NUM_OUT, 40)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["rows", "weight"], ["product"]),
            helper.make_node("MatMul", ["product", "head"], ["logits"]),
        ],
        "product",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, [1, "S", NUM_IN])],
        [
            helper.make_tensor_value_info("product", TensorProto.FLOAT, [1, "S", NUM_OUT]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "S", 40]),
        ],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(head, "head")],
    )
    opset = [helper.make_opsetid("", 24)]
    model = ir.serde.deserialize_model(helper.make_model(graph, opset_imports=opset, ir_version=10))
    quantize_graph(model, "int8-dynamic", is_exact=True, outliers=outliers)
    return ir.serde.serialize_model(model)


def product(model: onnx.ModelProto, values: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(["product"], {"rows": values[None]})[0][0]


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(NUM_IN, NUM_OUT)).astype(np.float32)


def test_kept_channels_save_the_others(weight) -> None:
    """Of the ordinary channels' part of a product, int8 with loud neighbours leaves little."""
    values = rows().numpy()
    kept = {key_of(weight.T[:1]): outliers_of(torch.from_numpy(values))}
    wanted = values.astype(np.float64) @ weight
    with_loud, without = (
        np.abs(product(quantized(weight, outliers), values) - wanted).mean()
        for outliers in ({}, kept)
    )
    assert without < with_loud / 10


def test_a_row_does_not_depend_on_its_neighbours(weight) -> None:
    values = rows().numpy()
    model = quantized(weight, {key_of(weight.T[:1]): np.array(LOUD)})
    whole = product(model, values)
    for size in (1, 2, 5, 33):
        assert np.array_equal(product(model, values[:size]), whole[:size])


def test_without_outliers_the_graph_is_as_it_was(weight) -> None:
    operators = [node.op_type for node in quantized(weight, {}).graph.node]
    assert operators.count("MatMulInteger") == 2 and "MatMul" not in operators
    kept = quantized(weight, {key_of(weight.T[:1]): np.array(LOUD)}).graph.node
    assert [node.op_type for node in kept].count("MatMul") == 1
