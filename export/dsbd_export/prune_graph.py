"""Prune graph: moves chosen cache rows together, in place."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from dsbd_export.config import OPSET
from dsbd_runtime.bundle import KVGeometry
from dsbd_runtime.graph import CACHE_PARTS, SRC_ROWS, WRITE_INDICES, past_name, present_name

_ROW_AXIS = 2
_IR_VERSION = 10  # the one that torch.onnx writes; onnxruntime refuses the newest
_ELEMENT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


def write_prune_graph(kv: KVGeometry, file: Path) -> None:
    """Write the graph for caches of this geometry.

    Row ``write_indices[0] + k`` of every cache becomes the old row ``src_rows[k]``. Binding one
    buffer to a cache's input and output is safe: all rows are gathered before any is written.
    """
    element_type = _ELEMENT_TYPES[kv.dtype]
    cache_shape = [1, kv.num_heads, "C", kv.head_dim]
    inputs = [
        helper.make_tensor_value_info(SRC_ROWS, TensorProto.INT64, ["K"]),
        helper.make_tensor_value_info(WRITE_INDICES, TensorProto.INT64, [1]),
    ]
    outputs, nodes = [], []
    for layer, part in ((layer, part) for layer in range(kv.num_layers) for part in CACHE_PARTS):
        past, present = past_name(layer, part), present_name(layer, part)
        kept = f"kept.{layer}.{part}"
        inputs.append(helper.make_tensor_value_info(past, element_type, cache_shape))
        outputs.append(helper.make_tensor_value_info(present, element_type, cache_shape))
        nodes += [
            helper.make_node("Gather", [past, SRC_ROWS], [kept], axis=_ROW_AXIS),
            helper.make_node(
                "TensorScatter",
                [past, kept, WRITE_INDICES],
                [present],
                axis=_ROW_AXIS,
                mode="linear",
            ),
        ]
    graph = helper.make_graph(nodes, "prune", inputs, outputs)
    opset = helper.make_opsetid("", OPSET)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION), file)
