"""Operators that ONNX Runtime's WebGPU plug-in 0.4.0 lacks, and their replacements.

| missing | replacement |
|---|---|
| Attention | MatMul, Add, Softmax, MatMul; query and key have the same heads |
| Round | Floor(x + 0.5) |
| Or | the sum of both as integers, compared with 0 |
| Slice of bool | Slice of float |
| Pad by one row | Concat with its first row: only the number of rows matters (exact attention) |
| ConstantOfShape | Expand, or an Add to zeros; a vector if it is the scale of a norm |
| sums in double (exact attention) | sums of high and low bits of the integers, each exact in fp32 |
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.config import EXACT, FUSED
from dsbd_export.errors import ExportError
from dsbd_export.passes.optimize import known_heads_and_width
from dsbd_export.passes.weighted_layers import replace_node
from dsbd_runtime.bundle_files.manifest import CUDA, PORTABLE, WEBGPU

LACKING = frozenset({
    "Attention", "ConstantOfShape", "Cos", "DequantizeLinear", "DynamicQuantizeLinear", "IsNaN",
    "LogSoftmax", "MatMulInteger", "Or", "Pad", "QuantizeLinear", "ReduceLogSumExp", "Round",
    "Sin", "TensorScatter",
})  # fmt: skip
"""Operators of other forms that the plug-in lacks, or computes wrongly."""
_DOUBLE = ir.DataType.DOUBLE
_LOW_BITS = 7  # half of an integer's bits: sums of either half over 2^17 integers have 24 bits
_MOST_SUMMED = 2**17


def replace_operators(model: ir.Model, context_length: int) -> int:
    """Replace nodes of a graph in place; return their number, or raise ExportError."""
    sums_double = any(_is_cast(node, _DOUBLE) for node in model.graph)
    if sums_double and context_length > _MOST_SUMMED:
        raise ExportError(
            f"form={WEBGPU!r} with attention={EXACT!r} adds up {_MOST_SUMMED} rows at most, the "
            f"context has {context_length}; use max_context={_MOST_SUMMED}, or attention={FUSED!r}"
        )
    num_replaced = 0
    for node in reversed(list(model.graph)):  # a node before the nodes that compute its inputs
        if node.op_type in _REPLACEMENTS:
            tape = ir.tape.Tape()
            result = _REPLACEMENTS[node.op_type](tape, node)
            if result is not None:
                replace_node(model.graph, node, tape, result)
                num_replaced += 1
    return num_replaced


def check_operators(model: ir.Model) -> None:
    """Raise ExportError if a graph has operators that the plug-in lacks."""
    lacking = {node.op_type for node in model.graph if node.op_type in LACKING}
    lacking |= {"Cast to double" for node in model.graph if _is_cast(node, _DOUBLE)}
    if lacking:
        raise ExportError(
            f"form={WEBGPU!r} has no operators in place of {', '.join(sorted(lacking))}; use form="
            f"{PORTABLE!r}, or form={CUDA!r} for a GPU of NVIDIA"
        )


def _attended(tape: ir.tape.Tape, node: ir.Node) -> ir.Value:
    query, key, value, mask = node.inputs[:4]
    assert query is not None and key is not None and key.dtype is not None
    _, width = known_heads_and_width(key)
    scale = np.array(node.attributes.get_float("scale", width**-0.5), key.dtype.numpy())
    turned = tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})
    scores = tape.op("MatMul", [tape.op("Mul", [query, constant(tape, scale)]), turned])
    weights = tape.op("Softmax", [tape.op("Add", [scores, mask])], {"axis": -1})
    return tape.op("MatMul", [weights, value])


def _rounded(tape: ir.tape.Tape, node: ir.Node) -> ir.Value:
    half = constant(tape, np.array(0.5, np.float32))
    return tape.op("Floor", [tape.op("Add", [node.inputs[0], half])])


def _either(tape: ir.tape.Tape, node: ir.Node) -> ir.Value:
    counts = [tape.op("Cast", [each], {"to": ir.DataType.INT32}) for each in node.inputs]
    return tape.op("Greater", [tape.op("Add", counts), constant(tape, np.array(0, np.int32))])


def _sliced(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    values, *bounds = node.inputs
    if values is None or values.dtype != ir.DataType.BOOL:
        return None
    numbers = tape.op("Cast", [values], {"to": ir.DataType.FLOAT})
    return tape.op("Cast", [tape.op("Slice", [numbers, *bounds])], {"to": ir.DataType.BOOL})


def _with_first_row(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    rows, pads, _, axis = [*node.inputs, None, None][:4]
    if pads is None or axis is None:
        return None
    before_and_after, place = (ir.convenience.get_const_tensor(each) for each in (pads, axis))
    if before_and_after is None or place is None or before_and_after.numpy().tolist() != [0, 1]:
        return None
    first = tape.op("Slice", [rows, constant(tape, [0]), constant(tape, [1]), axis])
    return tape.op("Concat", [rows, first], {"axis": int(place.numpy().item())})


def _filled(tape: ir.tape.Tape, node: ir.Node) -> ir.Value:
    value = node.attributes.get("value")
    number = ir.tensor(np.zeros(1, np.float32)) if value is None else value.as_tensor()
    filling, size = tape.op("Constant", [], {"value": number}), node.inputs[0]
    shape = None if size is None else size.producer()
    like = None if shape is None else shape.inputs[0]
    if like is None or like.dtype != ir.DataType.INT64:
        return tape.op("Expand", [filling, size])
    numbers = tape.op("Cast", [like], {"to": number.dtype})  # Shape of int64 is missing
    zero = constant(tape, np.array(0, number.dtype.numpy()))
    return tape.op("Add", [tape.op("Mul", [numbers, zero]), filling])


def _norm_without_scale(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    """Return the norm of rows whose scale is a tensor of ones; it becomes a vector of ones."""
    rows, scale = node.inputs
    maker = None if scale is None else scale.producer()
    if maker is None or maker.op_type != "ConstantOfShape":
        return None
    width = None if rows is None or rows.shape is None else rows.shape[-1]
    assert rows is not None and rows.dtype is not None and isinstance(width, int)
    ones = np.ones(width, rows.dtype.numpy())
    return tape.op("RMSNormalization", [rows, constant(tape, ones)], node.attributes)


def _sum_in_parts(tape: ir.tape.Tape, node: ir.Node) -> ir.Value | None:
    """Return the sum of integers w from 0 to 2^14, as a sum in double rounded to fp32 would be.

    It is 128 times the sum of w // 128, plus the sum of w % 128; see ``exact_attention``.
    """
    numbers, axes = node.inputs
    cast = None if numbers is None else numbers.producer()
    if cast is None or not _is_cast(cast, _DOUBLE):
        return None
    step, inverse = (
        constant(tape, np.array(2.0**bits, np.float32)) for bits in (_LOW_BITS, -_LOW_BITS)
    )
    integers = cast.inputs[0]
    high = tape.op("Floor", [tape.op("Mul", [integers, inverse])])
    low = tape.op("Sub", [integers, tape.op("Mul", [high, step])])
    sums = [tape.op("ReduceSum", [part, axes], {"keepdims": 1}) for part in (high, low)]
    return tape.op("Add", [tape.op("Mul", [sums[0], step]), sums[1]])


_REPLACEMENTS: Mapping[str, Callable[[ir.tape.Tape, ir.Node], ir.Value | None]] = {
    "Attention": _attended,
    "ConstantOfShape": _filled,
    "Or": _either,
    "Pad": _with_first_row,
    "ReduceSum": _sum_in_parts,
    "RMSNormalization": _norm_without_scale,
    "Round": _rounded,
    "Slice": _sliced,
}
"""By operator: records replacement nodes and returns their result; None if the node may stay."""


def _is_cast(node: ir.Node, dtype: ir.DataType) -> bool:
    return node.op_type == "Cast" and node.attributes.get_int("to") == dtype


def constant(tape: ir.tape.Tape, array: Sequence[int] | NDArray[np.generic]) -> ir.Value:
    """Record a constant."""
    return tape.op("Constant", [], {"value": ir.tensor(np.asarray(array))})
