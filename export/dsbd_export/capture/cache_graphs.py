"""Graphs over caches alone: rows moved by a prune, or folded into a checkpoint of a recurrence.

The checkpoint has the matrix S and the decay G_c. The rows j are folded into it, and n is the last
of them. The new checkpoint has the matrix

    S' = exp(G_n - G_c) S + sum_j exp(G_n - G_j) k_j u_j'       and the decay G_n
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.capture.forest_graph import ExportContract
from dsbd_export.config import OPSET
from dsbd_runtime.parts.attention.cache_entries import (
    RECURRENT_DECAY,
    RECURRENT_DELTA,
    RECURRENT_KEY,
    RecurrentRows,
    folded_name,
    past_name,
    present_name,
    state_decay_name,
    state_name,
)
from dsbd_runtime.parts.recent.recent_rows import FOLDED_ROWS

_ROW_AXIS = 2
_IR_VERSION = 10  # the version that torch.onnx writes; onnxruntime refuses the newest
_ELEMENT_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}


def write_prune_graph(contract: ExportContract, file: Path) -> None:
    """Write the graph that moves rows of the caches of a contract.

    In every space, the old row ``src_rows[k]`` of every cache moves to ``write_indices[0] + k``.
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


def write_fold_graph(caches: Sequence[RecurrentRows], file: Path) -> None:
    """Write the graph that folds rows of these caches into their checkpoints."""
    builder = _Builder()
    inputs = [helper.make_tensor_value_info(FOLDED_ROWS, TensorProto.INT64, ["T"])]
    outputs = []
    for cache in caches:
        for part in cache.parts:
            shape = cache.shape(part, 0)
            inputs.append(_floats(past_name(cache.layer, part), (*shape[:2], "M", shape[3])))
        for name, numbers in cache.states.items():
            inputs.append(_floats(name, (1, *numbers)))
            outputs.append(_floats(folded_name(name), (1, *numbers)))
        _fold(builder, cache)
    graph = helper.make_graph(builder.nodes, "fold", inputs, outputs, builder.constants)
    opset = helper.make_opsetid("", OPSET)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION), file)


def _floats(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


class _Builder:
    """The nodes and constants of a graph so far."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node with one output; return its name."""
        output = output or f"{operator}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def constant(self, *numbers: int) -> str:
        """Add whole numbers as a vector; return its name."""
        name = f"constant.{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name


def _fold(builder: _Builder, cache: RecurrentRows) -> None:
    add, constant = builder.add, builder.constant
    state, state_decay = state_name(cache.layer), state_decay_name(cache.layer)
    keys, deltas, decays = (
        add("Gather", past_name(cache.layer, part), FOLDED_ROWS, axis=2)
        for part in (RECURRENT_KEY, RECURRENT_DELTA, RECURRENT_DECAY)
    )
    last = add("Slice", decays, constant(-1), constant(2**31), constant(2))  # (1, H, 1, 2)
    folded_decay = add("Squeeze", last, constant(2), output=folded_name(state_decay))
    summed = constant(-1)
    # Both numbers of a decay are subtracted before they are added: their sum has too few digits.
    left = add("Exp", add("ReduceSum", add("Sub", last, decays), summed))  # (1, H, T, 1)
    left_of_state = add("Exp", add("ReduceSum", add("Sub", folded_decay, state_decay), summed))
    group = cache.num_heads // cache.num_key_heads
    of_group = constant(1, cache.num_key_heads, group, -1, cache.value_width)
    written = add(
        "MatMul",
        add("Transpose", add("Unsqueeze", keys, constant(2)), perm=[0, 1, 2, 4, 3]),
        add("Reshape", add("Mul", deltas, left), of_group),
    )  # (1, Hk, H / Hk, Dk, Dv)
    kept = add("Mul", state, add("Unsqueeze", left_of_state, constant(-1)))
    of_heads = constant(1, cache.num_heads, cache.key_width, cache.value_width)
    add("Add", kept, add("Reshape", written, of_heads), output=folded_name(state))
