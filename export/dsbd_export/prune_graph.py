"""Prune graph: moves chosen cache rows together, in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from dsbd_export.config import OPSET
from dsbd_runtime.cache_entries import CacheEntry, parts_of, past_name, present_name
from dsbd_runtime.graph import SRC_ROWS, WRITE_INDICES

_ROW_AXIS = 2
_IR_VERSION = 10  # the one that torch.onnx writes; onnxruntime refuses the newest
_ELEMENT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


def write_prune_graph(caches: Sequence[CacheEntry], file: Path) -> None:
    """Write the graph for these caches.

    Row ``write_indices[0] + k`` of every cache becomes the old row ``src_rows[k]``. Binding one
    buffer to a cache's input and output is safe: all rows are gathered before any is written.
    """
    inputs = [
        helper.make_tensor_value_info(SRC_ROWS, TensorProto.INT64, ["K"]),
        helper.make_tensor_value_info(WRITE_INDICES, TensorProto.INT64, [1]),
    ]
    outputs, nodes = [], []
    for cache, part in parts_of(caches):
        past, present = past_name(cache.layer, part), present_name(cache.layer, part)
        kept, element_type = f"kept.{cache.layer}.{part}", _ELEMENT_TYPES[cache.dtype]
        shape = cache.shape(part, 0)
        cache_shape = [*shape[:2], "C", shape[3]]
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
