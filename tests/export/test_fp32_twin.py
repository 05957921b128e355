"""The twin of a bf16 graph: all of it in fp32, each weight widened right before its use."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from dsbd_export.gate.unwritten_bundle import fp32_twin
from tests.ort_sessions import cpu_session

ROWS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def bf16_graph(file):
    """``table[ids] @ table.T + 1``, the table tied and in bf16."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "table"], ["product"], transB=1),
        helper.make_node("Add", ["product", "one"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["logits"], to=TensorProto.FLOAT),
    ]
    weights = [
        helper.make_tensor("table", TensorProto.BFLOAT16, [3, 2], np.ravel(ROWS)),
        helper.make_tensor("one", TensorProto.BFLOAT16, [1], [1.0]),
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["S"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["S", 3])]
    graph = helper.make_graph(nodes, "bf16", inputs, outputs, weights)
    opset = helper.make_opsetid("", 24)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), file)


def test_the_twin_computes_in_fp32(tmp_path):
    bf16_graph(tmp_path / "model.onnx")
    session = cpu_session(fp32_twin(tmp_path / "model.onnx"))
    found = session.run(None, {"ids": np.array([2, 1])})[0]
    table = torch.tensor(ROWS)
    np.testing.assert_array_equal(found, table[[2, 1]] @ table.T + 1)


def test_weights_are_widened_where_they_are_used(tmp_path):
    bf16_graph(tmp_path / "model.onnx")
    twin = onnx.load_from_string(fp32_twin(tmp_path / "model.onnx"))
    kinds = [node.op_type for node in twin.graph.node]
    assert kinds == ["Gather", "Cast", "Cast", "Gemm", "Cast", "Add", "Cast"]
    assert twin.graph.node[0].input[0] == twin.graph.node[2].input[0] == "table"
    assert {weight.data_type for weight in twin.graph.initializer} == {TensorProto.BFLOAT16}
