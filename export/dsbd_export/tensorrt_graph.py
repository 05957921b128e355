"""The ONNX graph as TensorRT takes it: one capacity, and masks as numbers to add."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dsbd_runtime.graph import CACHE_PARTS, past_name

HIDDEN = -3e4  # exp(HIDDEN) is 0, and it is finite in float16 as well
_CAPACITY = "C"
_MASK_INPUT = 3  # of Attention
_PREFIX = "additive."


def tensorrt_graph(file: Path, capacity: int) -> onnx.ModelProto:
    """Return the graph of a file with caches of ``capacity`` rows; weights stay where they lie.

    TensorRT 11 refuses caches whose size is not known. And TensorRT for RTX 1.7 fails to build
    ("more than one op named attention_mask") where several Attention nodes read one bool input:
    each mask becomes 0 and HIDDEN once, in the type of the attention, for all layers.
    """
    model = onnx.load(file, load_external_data=False)
    _fix_capacity(model.graph, capacity)
    _add_masks(model.graph)
    return model


def _fix_capacity(graph: onnx.GraphProto, capacity: int) -> None:
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == _CAPACITY:
                dim.dim_value = capacity


def _add_masks(graph: onnx.GraphProto) -> None:
    """Let every Attention add its mask; a mask is converted where it is read first."""
    nodes: list[onnx.NodeProto] = []
    converted: set[str] = set()
    for node in graph.node:
        if node.op_type == "Attention":
            mask = node.input[_MASK_INPUT]
            if mask not in converted:
                converted.add(mask)
                choices = [mask, f"{_PREFIX}seen", f"{_PREFIX}hidden"]
                nodes.append(helper.make_node("Where", choices, [_PREFIX + mask]))
            node.input[_MASK_INPUT] = _PREFIX + mask
        nodes.append(node)
    if not converted:
        return
    element_type = _type_of_caches(graph)
    for name, number in (("seen", 0.0), ("hidden", HIDDEN)):
        graph.initializer.append(_scalar(_PREFIX + name, number, element_type))
    del graph.node[:]
    graph.node.extend(nodes)


def _type_of_caches(graph: onnx.GraphProto) -> int:
    first = past_name(0, CACHE_PARTS[0])
    [element_type] = [v.type.tensor_type.elem_type for v in graph.input if v.name == first]
    return int(element_type)


def _scalar(name: str, number: float, element_type: int) -> TensorProto:
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    return numpy_helper.from_array(np.array(number, dtype), name)
