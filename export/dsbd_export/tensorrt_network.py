"""A graph parsed into a TensorRT network, and the check that its caches are updated in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from dsbd_export.errors import ExportError
from dsbd_runtime.graph import CACHE_PARTS, past_name, present_name


def parse_network(trt: ModuleType, builder: Any, model: onnx.ModelProto, file: Path) -> Any:
    """Return the network of a graph whose weights lie beside ``file``.

    Raises:
        ExportError: TensorRT cannot read the graph, or would copy a cache instead of updating it.
    """
    network = builder.create_network(_creation_flags(trt))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse(model.SerializeToString(), str(file)):
        reason = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ExportError(f"TensorRT cannot read {file}: {reason}; export with engine='onnx'")
    if problem := next(network_problems(trt, network, model.graph), None):
        raise ExportError(f"TensorRT reads {file} wrongly: {problem}; export with engine='onnx'")
    return network


def network_problems(trt: ModuleType, network: Any, graph: onnx.GraphProto) -> Iterator[str]:
    """Yield where a network is not what its graph says."""
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
    for layer_index in range(layers[trt.LayerType.KV_CACHE_UPDATE] // len(CACHE_PARTS)):
        for part in CACHE_PARTS:
            pair = past_name(layer_index, part), present_name(layer_index, part)
            if pair not in updates:
                yield f"no cache update goes from input {pair[0]} straight to output {pair[1]}"


def decompose_attention(trt: ModuleType, network: Any) -> None:
    """Let TensorRT compute attention in pieces where it has no kernel for the whole."""
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionBoundaryLayer  # a network hands out the base class
            layer.attention.decomposable = True


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _creation_flags(trt: ModuleType) -> int:
    """Return "strongly typed", which 10.x must be told and later versions always are."""
    flag = trt.NetworkDefinitionCreationFlag.__members__.get("STRONGLY_TYPED")
    return 0 if flag is None else 1 << int(flag)
