"""Prune graph: moves chosen cache rows together, in place."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from dsbd_export.capture.part import ExportContract
from dsbd_export.config import OPSET
from dsbd_runtime.parts.cache_entries import past_name, present_name

_ROW_AXIS = 2
_IR_VERSION = 10  # the one that torch.onnx writes; onnxruntime refuses the newest
_ELEMENT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


def write_prune_graph(contract: ExportContract, file: Path) -> None:
    """Write the graph for the caches of a contract.

    Row ``write_indices[0] + k`` of every cache becomes the old row ``src_rows[k]``, in every space.
    """
    inputs = []
    for space in contract.spaces:
        for name, size in ((space.src_rows, space.num_kept), (space.write_indices, 1)):
            inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, [size]))
    outputs, nodes = [], []
    for cache, part, space in contract.tensors:
        past, present = past_name(cache.layer, part), present_name(cache.layer, part)
        kept, element_type = f"kept.{cache.layer}.{part}", _ELEMENT_TYPES[cache.dtype]
        shape = cache.shape(part, 0)
        cache_shape = [*shape[:2], space.rows.name, shape[3]]
        inputs.append(helper.make_tensor_value_info(past, element_type, cache_shape))
        outputs.append(helper.make_tensor_value_info(present, element_type, cache_shape))
        nodes += [
            helper.make_node("Gather", [past, space.src_rows], [kept], axis=_ROW_AXIS),
            helper.make_node(
                "TensorScatter",
                [past, kept, space.write_indices],
                [present],
                axis=_ROW_AXIS,
                mode="linear",
            ),
        ]
    graph = helper.make_graph(nodes, "prune", inputs, outputs)
    opset = helper.make_opsetid("", OPSET)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION), file)
