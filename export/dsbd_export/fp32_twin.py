"""A graph in bf16 as one in fp32, so that ONNX Runtime's CPU provider can run it for parity.

That provider has no MatMul, Add, RMSNormalization, ... in bf16. In the twin every weight is the
bf16 one, widened, and all arithmetic and the caches are fp32. So parity of a bf16 export judges
the graph and the rounding of its weights, not the rounding of activations and caches on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

LOW, HIGH = TensorProto.BFLOAT16, TensorProto.FLOAT


def fp32_twin(model_file: Path) -> bytes:
    """Return the twin; its weights stay where they are, in the external data of ``model_file``.

    Each is widened where it is used, right before: all at once would take twice their size.
    """
    model = onnx.load(model_file, load_external_data=False)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == LOW:
            value.type.tensor_type.elem_type = HIGH
    del graph.value_info[:]
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        _widen_attribute(attribute)
    stored = {weight.name for weight in graph.initializer if weight.data_type == LOW}
    nodes = [part for node in graph.node for part in _with_widened_weights(node, stored)]
    del graph.node[:]
    graph.node.extend(nodes)
    twin: bytes = model.SerializeToString()
    return twin


def _with_widened_weights(node: onnx.NodeProto, stored: set[str]) -> list[onnx.NodeProto]:
    """Return a node between the Casts that it needs, one for each stored weight that it reads."""
    if node.op_type == "Gather" and node.input[0] in stored:  # few rows of an embedding
        rows, (result,) = f"{node.output[0]}.stored", node.output
        node.output[0] = rows
        return [node, helper.make_node("Cast", [rows], [result], to=HIGH)]
    casts = []
    for index, name in enumerate(node.input):
        if name in stored:
            node.input[index] = f"{name}.for.{node.output[0]}.{index}"
            casts.append(helper.make_node("Cast", [name], [node.input[index]], to=HIGH))
    return [*casts, node]


def _widen_attribute(attribute: onnx.AttributeProto) -> None:
    """Change the type that a Cast goes to, and the value of a constant."""
    if attribute.name == "to" and attribute.i == LOW:
        attribute.i = HIGH
    if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == LOW:
        widened = numpy_helper.to_array(attribute.t).astype("float32")
        attribute.t.CopyFrom(numpy_helper.from_array(widened, attribute.t.name))
