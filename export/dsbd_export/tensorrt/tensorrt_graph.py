"""TensorRT's form of a graph: one capacity, additive masks, caches that are updated in place."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.errors import ExportError

HIDDEN = -3e4  # exp(HIDDEN) is 0; finite in float16 too
_CAPACITY = "C"
_MASK_INPUT = 3  # index of Attention's input
_PREFIX = "additive."


def tensorrt_graph(file: Path, capacity: int) -> onnx.ModelProto:
    """Return the graph of a file with caches of ``capacity`` rows; weights stay in their file.

    TensorRT 11 refuses caches of unknown size. TensorRT for RTX 1.7 fails if several Attention
    nodes read one bool input ("more than one op named attention_mask"). So each mask is converted
    to 0 and HIDDEN once for all layers.
    """
    model = onnx.load(file, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == _CAPACITY:
                dim.dim_value = capacity
    _add_masks(model.graph)
    return model


def _add_masks(graph: onnx.GraphProto) -> None:
    """Make every Attention add its mask; a mask is converted before its first reader."""
    masks = {
        value.name for value in graph.input if value.type.tensor_type.elem_type == TensorProto.BOOL
    }
    nodes: list[onnx.NodeProto] = []
    converted: set[str] = set()
    for node in graph.node:
        if node.op_type == "Attention" and (mask := node.input[_MASK_INPUT]) in masks:
            if mask not in converted:
                converted.add(mask)
                choices = [mask, f"{_PREFIX}seen", f"{_PREFIX}hidden"]
                nodes.append(helper.make_node("Where", choices, [_PREFIX + mask]))
            node.input[_MASK_INPUT] = _PREFIX + mask
        nodes.append(node)
    if not converted:
        return
    cache = next(value for value in graph.input if value.name in _caches(graph))
    dtype = helper.tensor_dtype_to_np_dtype(cache.type.tensor_type.elem_type)
    for name, number in (("seen", 0.0), ("hidden", HIDDEN)):
        graph.initializer.append(numpy_helper.from_array(np.array(number, dtype), _PREFIX + name))
    del graph.node[:]
    graph.node.extend(nodes)


def _caches(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the output of each cache by its input."""
    return {node.input[0]: node.output[0] for node in graph.node if node.op_type == "TensorScatter"}


def parse_network(trt: ModuleType, builder: Any, model: onnx.ModelProto, file: Path) -> Any:
    """Return the network of a graph whose weights are next to ``file``; or raise ExportError."""
    # In 10.x networks are strongly typed only with this flag, in later versions always.
    flag = trt.NetworkDefinitionCreationFlag.__members__.get("STRONGLY_TYPED")
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse(model.SerializeToString(), str(file)):
        reason = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ExportError(f"TensorRT cannot read {file}: {reason}; export with engine='onnx'")
    if problem := next(network_problems(trt, network, model.graph), None):
        raise ExportError(f"TensorRT reads {file} wrongly: {problem}; export with engine='onnx'")
    return network


def network_problems(trt: ModuleType, network: Any, graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the differences between a network and its graph."""
    operators = Counter(node.op_type for node in graph.node)
    layers = Counter(layer.type for layer in _layers(network))
    for operator, layer in (
        ("TensorScatter", trt.LayerType.KV_CACHE_UPDATE),
        ("Attention", trt.LayerType.ATTENTION_INPUT),
    ):
        if layers[layer] != operators[operator]:
            yield (f"{layers[layer]} layers {layer.name} of {operators[operator]} nodes {operator}")
    updates = {
        (layer.get_input(0).name, layer.get_output(0).name)
        for layer in _layers(network)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE
        and layer.get_input(0).is_network_input
        and layer.get_output(0).is_network_output
    }
    for pair in _caches(graph).items():
        if pair not in updates:
            yield f"no cache update goes from input {pair[0]} straight to output {pair[1]}"


def decompose_attention(trt: ModuleType, network: Any) -> None:
    """Allow TensorRT to decompose attention for which it has no fused kernel."""
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionBoundaryLayer  # a network returns the base class
            layer.attention.decomposable = True


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))
