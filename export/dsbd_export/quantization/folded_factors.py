"""Constant factors of attention folded into the weights of products: a node less each.

    (rows @ weight + bias) * f = rows @ (weight * f) + bias * f      f a number, or one a column
    (rows * f) @ weight        = rows @ (f * weight)                 f one a channel

Exact attention multiplies queries by 1 / root(D), new values by what makes integers of them, and
what it attends to by what makes values of those again. The first two take the way back to the
columns of the product of queries and values, the last goes into the product behind attention, where
rows lose little by it. Integers of a weight depend on no factor of its columns, so that the first
two change nothing but for rounding.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.passes.weighted_layers import Linear
from dsbd_export.quantization.equalize import (
    Divide,
    Equalizer,
    is_read_by,
    is_vector,
    weight_by_output,
)
from dsbd_export.quantization.row_forms import RowForm

_HEADS_AND_ROWS = [0, 2, 1, 3]  # swaps the two, either way
_KEEPS_FACTOR = ("Identity", "Reshape", "Transpose", "RotaryEmbedding")


def fold_factors(graph: ir.Graph, equalizer: Equalizer) -> int:
    """Fold the factors of a graph before its products are quantized; return how many.

    equalizer: has put the products into their forms, and rewrites their weights.
    """
    num_folded = 0
    for node in list(graph):
        found = _factor(node)
        if found is None or node.outputs[0].is_graph_output():
            continue
        value, factor = found
        if _fold_before(equalizer, node, value, factor) or _fold_behind(equalizer, node, factor):
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            graph.remove(node, safe=True)
            num_folded += 1
    return num_folded


def _factor(node: ir.Node) -> tuple[ir.Value, NDArray[np.float32]] | None:
    """Return what a node multiplies by a constant, and that: a number, or (1, H, 1, D)."""
    if node.op_type != "Mul":
        return None
    for value, constant in (node.inputs, reversed(node.inputs)):
        if value is None or constant is None or not constant.is_initializer():
            continue
        tensor = constant.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT:
            continue
        shape = tuple(tensor.shape.numpy())
        is_number = tensor.size == 1 and len(shape) < 2  # more axes could be new ones
        if is_number or (len(shape) == 4 and shape[0] == shape[2] == 1 < tensor.size):
            return value, tensor.numpy()
    return None


def _fold_before(
    equalizer: Equalizer, node: ir.Node, value: ir.Value, factor: NDArray[np.float32]
) -> bool:
    """Fold a factor of what a product gives into its columns, where nothing else reads that."""
    steps, reader = [], node
    while (maker := value.producer()) is not None and maker.op_type in _KEEPS_FACTOR:
        if not is_read_by(value, {reader}) or maker.inputs[0] is None:
            return False
        steps.append(maker)
        value, reader = maker.inputs[0], maker
    dividers = _dividers(equalizer, value, reader)
    width = None if value.shape is None else value.shape[-1]
    if not dividers or not isinstance(width, int):
        return False
    if factor.size > 1 and (factor.size != width or not _are_heads_of_columns(steps, factor.shape)):
        return False
    scales = np.broadcast_to(1 / factor.ravel(), width).astype(np.float32)
    for divide in dividers:
        divide(scales)
    return True


def _dividers(equalizer: Equalizer, value: ir.Value, reader: ir.Node) -> list[Divide]:
    """Return what together divides what a product gives, with a bias or without; none: nothing."""
    maker = value.producer()
    bias: list[Divide] = []
    if maker is not None and maker.op_type == "Add" and is_read_by(value, {reader}):
        vectors = [index for index in (0, 1) if is_vector(maker.inputs[index])]
        if len(vectors) != 1 or (sum_of := maker.inputs[1 - vectors[0]]) is None:
            return []
        bias = [equalizer.divides_inputs(maker, vectors)]
        value, reader = sum_of, maker
    divide = equalizer.divides_product(value, reader)
    return [] if divide is None else [divide, *bias]


def _are_heads_of_columns(steps: list[ir.Node], shape: tuple[int, ...]) -> bool:
    """Return whether steps, the last first, make heads (1, H, S, D) of columns (1, S, H * D)."""
    if [step.op_type for step in steps] != ["Transpose", "Reshape"]:
        return False
    return _swaps(steps[0]) and _heads(steps[0].outputs[0]) == (shape[1], shape[3])


def _fold_behind(equalizer: Equalizer, node: ir.Node, factor: NDArray[np.float32]) -> bool:
    """Fold a factor of what is attended to into the product that alone reads it."""
    joined = _joined_heads(node) if factor.size > 1 else None
    if joined is None:
        return False
    num_heads, linear = joined[0], _only_product(equalizer, joined[1])
    if linear is None or num_heads % factor.shape[1]:
        return False
    # Query heads of one key head lie side by side.
    of_heads = np.repeat(factor[0, :, 0], num_heads // factor.shape[1], axis=0)  # (H, D)
    weight = weight_by_output(linear)
    seen = equalizer.seen_rows([weight])
    scales = np.asarray(of_heads.ravel(), np.float32)
    if seen is None or len(scales) != weight.shape[1]:
        return False
    if not equalizer.choice.takes_scales(seen, weight, scales):
        return False
    equalizer.reform(linear, RowForm(scales))
    return True


def _joined_heads(node: ir.Node) -> tuple[int, ir.Value] | None:
    """Return H, and rows (.., H * D) that a node's heads are joined to, None where they are not.

    (1, Hkv, G * S, D) -> (1, H, S, D) -> (1, S, H, D) -> (1, S, H * D), and perhaps (S, H * D)
    """
    value, num_heads = node.outputs[0], 0
    for op_type in ("Reshape", "Transpose", "Reshape"):
        reader = _only_reader(value)
        if reader is None or reader.op_type != op_type:
            return None
        value = reader.outputs[0]
        if op_type == "Transpose":
            heads = _heads(reader.inputs[0])
            if heads is None or not _swaps(reader):
                return None
            num_heads = heads[0]
    while (reader := _only_reader(value)) is not None and reader.op_type == "Reshape":
        value = reader.outputs[0]
    return num_heads, value


def _only_product(equalizer: Equalizer, rows: ir.Value) -> Linear | None:
    """Return the product that alone reads rows."""
    reader = _only_reader(rows)
    return None if reader is None else equalizer.product_of(reader)


def _only_reader(value: ir.Value) -> ir.Node | None:
    """Return the node that alone reads a value as its first input."""
    uses = list(value.uses())
    if len(uses) != 1 or uses[0].idx != 0 or value.is_graph_output():
        return None
    return uses[0].node


def _swaps(transpose: ir.Node) -> bool:
    return list(transpose.attributes.get_ints("perm", ())) == _HEADS_AND_ROWS


def _heads(value: ir.Value | None) -> tuple[int, int] | None:
    """Return H and D of (1, H, S, D) where both are known."""
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    heads, width = value.shape[1], value.shape[3]
    return (heads, width) if isinstance(heads, int) and isinstance(width, int) else None
