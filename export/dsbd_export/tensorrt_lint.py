"""What TensorRT refuses or reads differently, looked for in a graph without TensorRT.

Used on every export in fp16 and bf16 without quantization, which are the ones for TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError

MAX_OPSET = 25
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_CHANGES_TYPE = ("Cast", "CastLike")
_PAST_INPUTS = {4: "past_key", 5: "past_value", 6: "nonpad_kv_seqlen"}


def check_for_tensorrt(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Raise when TensorRT would not build the graph of this checkpoint."""
    if findings := lint_for_tensorrt(model):
        raise ExportError(
            f"the graph of the {checkpoint.role} (family {checkpoint.family}) cannot become a "
            f"TensorRT engine: {findings[0]} ({len(findings)} findings); export it with dtype=fp32"
        )


def lint_for_tensorrt(model: ir.Model) -> list[str]:
    """Return what is wrong, one line each; nothing when TensorRT can be expected to build it."""
    findings = list(_lint_operators(model))
    for node in model.graph:
        if node.op_type == "TensorScatter":
            findings += _lint_scatter(node)
        elif node.op_type == "Attention":
            findings += _lint_attention(node)
        findings += _lint_types(node)
    return findings


def _lint_operators(model: ir.Model) -> Iterator[str]:
    opset = model.opset_imports.get("")
    if opset is None or opset > MAX_OPSET:
        yield f"opset {opset}, expected at most {MAX_OPSET}"
    if model.functions:
        yield f"local functions {sorted(map(str, model.functions))}, expected none"
    for domain, op_type in sorted({(n.domain, n.op_type) for n in model.graph if n.domain}):
        yield f"operator {domain}::{op_type}, expected only ai.onnx"


def _lint_scatter(node: ir.Node) -> Iterator[str]:
    """Check a cache update: the cache goes in as graph input and comes out as graph output."""
    past, present = node.inputs[0], node.outputs[0]
    name = f"TensorScatter to {present.name}"
    if past is None or not past.is_graph_input():
        yield f"{name} updates {past.name if past else None}, expected a graph input"
    if not present.is_graph_output():
        yield f"{name} makes no graph output"
    if past is None or past.shape is None or len(past.shape) != 4:
        yield f"{name} updates a cache of shape {past.shape if past else None}, expected 4 axes"
    if (axis := node.attributes.get_int("axis", -2)) not in (2, -2):
        yield f"{name} has axis {axis}, expected 2"
    if (mode := node.attributes.get_string("mode", "linear")) != "linear":
        yield f"{name} has mode {mode}, expected linear"


def _lint_attention(node: ir.Node) -> Iterator[str]:
    name = f"Attention to {node.outputs[0].name}"
    if sum(not _is_left_out(output) for output in node.outputs) != 1:
        yield f"{name} has {len(node.outputs)} outputs, expected one"
    for index, input_name in _PAST_INPUTS.items():
        if index < len(node.inputs) and node.inputs[index] is not None:
            yield f"{name} has the input {input_name}, expected none"
    if is_causal := node.attributes.get_int("is_causal", 0):
        yield f"{name} has is_causal {is_causal}, expected 0: the mask says all"
    if softcap := node.attributes.get_float("softcap", 0.0):
        yield f"{name} has softcap {softcap:g}, expected none: write it as MatMul and Tanh"


def _is_left_out(output: ir.Value) -> bool:
    return not output.name and not output.uses()


def _lint_types(node: ir.Node) -> Iterator[str]:
    """TensorRT is strongly typed: what mixes float types needs an explicit Cast."""
    if node.op_type in _CHANGES_TYPE:
        return
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    found = sorted({value.dtype.name for value in values if value.dtype in _FLOATS and value.dtype})
    if len(found) > 1:
        yield (
            f"{node.op_type} to {node.outputs[0].name} mixes {' and '.join(found)}, "
            "expected one type or explicit casts"
        )
