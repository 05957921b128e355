"""Prune graph: moves chosen cache rows together, in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from dsbd_export.config import OPSET
from dsbd_runtime.parts.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.cache_entries import CacheEntry, parts_of, past_name, present_name, recent
from dsbd_runtime.parts.recent_rows import RECENT_WRITE_INDICES, SRC_RECENT_ROWS

_ROW_AXIS = 2
_IR_VERSION = 10  # the one that torch.onnx writes; onnxruntime refuses the newest
_ELEMENT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


def write_prune_graph(caches: Sequence[CacheEntry], file: Path) -> None:
    """Write the graph for these caches.

    Row ``write_indices[0] + k`` of every cache becomes the old row ``src_rows[k]``; recent rows
    have inputs of their own, of which there may be none at all. Binding one buffer to a cache's
    input and output is safe: all rows are gathered before any is written.
    """
    names = {"C": (SRC_ROWS, "K", WRITE_INDICES)}
    if recent(caches):
        names["M"] = SRC_RECENT_ROWS, "N", RECENT_WRITE_INDICES
    inputs = []
    for rows, num_rows, first in names.values():
        inputs.append(helper.make_tensor_value_info(rows, TensorProto.INT64, [num_rows]))
        inputs.append(helper.make_tensor_value_info(first, TensorProto.INT64, [1]))
    outputs, nodes = [], []
    for cache, part in parts_of(caches):
        dim = "M" if cache in recent(caches) else "C"
        src_rows, _, write_indices = names[dim]
        past, present = past_name(cache.layer, part), present_name(cache.layer, part)
        kept, element_type = f"kept.{cache.layer}.{part}", _ELEMENT_TYPES[cache.dtype]
        shape = cache.shape(part, 0)
        cache_shape = [*shape[:2], dim, shape[3]]
        inputs.append(helper.make_tensor_value_info(past, element_type, cache_shape))
        outputs.append(helper.make_tensor_value_info(present, element_type, cache_shape))
        nodes += [
            helper.make_node("Gather", [past, src_rows], [kept], axis=_ROW_AXIS),
            helper.make_node(
                "TensorScatter",
                [past, kept, write_indices],
                [present],
                axis=_ROW_AXIS,
                mode="linear",
            ),
        ]
    graph = helper.make_graph(nodes, "prune", inputs, outputs)
    opset = helper.make_opsetid("", OPSET)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION), file)
