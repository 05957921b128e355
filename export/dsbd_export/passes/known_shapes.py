"""Replacement of shapes that a graph computes although they are known: they become constants."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer


def fix_known_dimensions(model: ir.Model) -> None:
    """Replace known dimensions that a graph reads from shapes by constants, in place."""
    for node in list(model.graph):
        dims = _known_dims(node)
        if dims is not None:
            node.outputs[0].replace_all_uses_with(_constant_before(model, node, dims))
    onnxscript.optimizer.fold_constants(model)


def _known_dims(node: ir.Node) -> Any:
    """Return the dimensions that a Gather reads from a shape, None if unknown or another node."""
    if node.op_type != "Gather":
        return None
    dims, index = node.inputs
    read = None if dims is None else dims.producer()
    places = None if index is None else ir.convenience.get_const_tensor(index)
    if read is None or read.op_type != "Shape" or places is None:
        return None
    source = read.inputs[0]
    if source is None or source.shape is None:
        return None
    begin, end = read.attributes.get_int("start", 0), read.attributes.get_int("end", None)
    sizes = np.array([dim if isinstance(dim, int) else -1 for dim in source.shape], np.int64)
    taken = sizes[begin:end].take(places.numpy())
    return taken if (taken >= 0).all() else None


def fix_reshapes(model: ir.Model) -> int:
    """Give constant dimensions to every Reshape that allows it, in place; return their number.

    To reshape (1, 2, 2*S, C) to (1, 4, S, C) with 4 heads, they are [1, 4, -1, 0]. 0 copies the
    input's dimension, -1 is computed from the others.
    """
    num_fixed = 0
    for node in model.graph:
        if node.op_type == "Reshape" and _give_dims(model, node, _dims_to_reshape):
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
            num_fixed += 1
    return num_fixed


def fix_expansions(model: ir.Model) -> int:
    """Give every Expand constant dimensions: from (1, S, 2, 1, D) to 4 heads [1, 1, 2, 4, D]."""
    return sum(
        node.op_type == "Expand" and _give_dims(model, node, _dims_to_expand)
        for node in list(model.graph)
    )


def _give_dims(
    model: ir.Model, node: ir.Node, dims_of: Callable[[ir.Shape, ir.Shape], list[int] | None]
) -> bool:
    """Replace a node's computed dimensions by constants if ``dims_of`` can derive them."""
    source, dims = node.inputs
    if source is None or dims is None or ir.convenience.get_const_tensor(dims) is not None:
        return False
    before, after = source.shape, node.outputs[0].shape
    constants = None if before is None or after is None else dims_of(before, after)
    if constants is None:
        return False
    node.replace_input_with(1, _constant_before(model, node, constants))
    return True


def _constant_before(model: ir.Model, node: ir.Node, dims: Any) -> ir.Value:
    """Return a constant of these dimensions; its node is inserted before ``node``."""
    constant = ir.Node("", "Constant", [], attributes=[ir.AttrTensor("value", ir.tensor(dims))])
    model.graph.insert_before(node, constant)
    return constant.outputs[0]


def _dims_to_reshape(source: ir.Shape, result: ir.Shape) -> list[int] | None:
    """Return the constant dimensions of a Reshape, None if more than one must be computed."""
    dims = [
        dim
        if isinstance(dim, int)
        else 0
        if dim.value is not None and dim in source[axis : axis + 1]
        else -1
        for axis, dim in enumerate(result)
    ]
    return dims if dims.count(-1) <= 1 else None


def _dims_to_expand(source: ir.Shape, result: ir.Shape) -> list[int] | None:
    """Return the constant dimensions of an Expand, None if an unknown dimension is new."""
    old = [1] * (len(result) - len(source)) + list(source)
    dims = [
        dim if isinstance(dim, int) else 1 if dim.value is not None and dim == before else 0
        for before, dim in zip(old, result, strict=True)
    ]
    return dims if all(dims) else None
