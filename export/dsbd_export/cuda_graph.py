"""CUDA's form of a graph: ONNX Runtime's own operators, each a kernel in the place of several.

* ``Add`` and ``RMSNormalization`` of its sum become ``SkipSimplifiedLayerNormalization``, which
  returns the sum beside the norm: the residual stream is read once.
* Masks become numbers to add once a forward, in the type of the attention. Of a bool mask every
  attention makes such numbers for itself, and searches them for rows that see nothing.

* Query, key and value heads are turned from rows by heads to heads by rows together, before they
  are split: one transposition of (1, S, H + 2 Hkv, D) instead of three.

A bundle of this form runs on the CPU provider too, which has the operators, but not in TensorRT.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassManager, common

from dsbd_export.optimize import added_mask, known_heads_and_width
from dsbd_export.quantize_blockwise import MICROSOFT_DOMAIN
from dsbd_export.weighted_layers import Store

_MICROSOFT_OPSET = 1
_MASK_INPUT = 3  # of Attention
_HEADS_FIRST = [0, 2, 1, 3]
_SUM_OUTPUT = 3  # of SkipSimplifiedLayerNormalization


def use_cuda_operators(model: ir.Model) -> str:
    """Give a graph CUDA's form in place; return what was done, as progress."""
    num_norms = fuse_skipped_norms(model)
    num_masks = add_masks(model)
    num_splits = transpose_before_split(model.graph)
    PassManager([common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass()])(model)
    return (
        f"{num_norms} norms take their sums, {num_masks} masks are added, "
        f"heads of {num_splits} layers are transposed at once"
    )


def fuse_skipped_norms(model: ir.Model) -> int:
    """Merge each RMSNormalization with the Add before it; return how many were merged.

    Attention and MLP of a layer each end in such an Add, ``total = x + new``, whose sum is normed
    for the next of them and added to again behind that.
    """
    graph, num_fused = model.graph, 0
    for norm in list(graph):
        if norm.op_type != "RMSNormalization" or norm.inputs[0] is None:
            continue
        total = norm.inputs[0].producer()
        if total is None or not _is_sum_of_rows(total, norm):
            continue
        fused = ir.Node(
            MICROSOFT_DOMAIN,
            "SkipSimplifiedLayerNormalization",
            [*total.inputs, norm.inputs[1]],
            attributes=[ir.AttrFloat32("epsilon", norm.attributes.get_float("epsilon", 1e-5))],
            num_outputs=4,
        )
        for unused in fused.outputs[1:_SUM_OUTPUT]:
            unused.name = ""
        graph.insert_before(total, fused)
        for old, new in ((norm, fused.outputs[0]), (total, fused.outputs[_SUM_OUTPUT])):
            new.shape, new.type = old.outputs[0].shape, old.outputs[0].type
            ir.convenience.replace_all_uses_with(old.outputs[0], new)
        graph.remove([norm, total], safe=True)
        num_fused += 1
    if num_fused:
        graph.opset_imports[MICROSOFT_DOMAIN] = _MICROSOFT_OPSET
    return num_fused


def _is_sum_of_rows(total: ir.Node, norm: ir.Node) -> bool:
    """Return whether ``total`` adds two tensors (1, S, H) in the precision that ``norm`` scales."""
    values = (*total.inputs, norm.inputs[1])
    if total.op_type != "Add" or norm.attributes.get_int("axis", -1) != -1:
        return False
    if any(value is None or value.shape is None for value in values):
        return False
    first, second, scale = (value for value in values if value is not None)
    dtypes = {first.dtype, second.dtype, scale.dtype}
    return (
        first.shape == second.shape
        and first.shape is not None
        and len(first.shape) == 3
        and len(dtypes) == 1
        and not total.outputs[0].is_graph_output()
        and not norm.outputs[0].is_graph_output()
    )


def add_masks(model: ir.Model) -> int:
    """Let every Attention add its mask; return how many masks were turned into numbers."""
    graph = model.graph
    numbers: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type != "Attention" or (mask := node.inputs[_MASK_INPUT]) is None:
            continue
        if mask.dtype != ir.DataType.BOOL or node.inputs[0] is None:
            continue
        if mask not in numbers:
            tape = ir.tape.Tape()
            numbers[mask] = added_mask(tape, mask, node.inputs[0].dtype)
            graph.insert_before(node, tape.nodes)
        node.replace_input_with(_MASK_INPUT, numbers[mask])
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return len(numbers)


def transpose_before_split(graph: ir.Graph) -> int:
    """Transpose query, key and value heads of a merged product at once; return how many times.

    Split, then Reshape and Transpose of each part, become Reshape, Transpose and Split. Families
    that norm query and key heads in between stay as they are.
    """
    store = Store(graph, "cuda")
    num_changed = 0
    for split in list(graph):
        if split.op_type != "Split" or (rows := split.inputs[0]) is None:
            continue
        found = [_reshaped_and_transposed(part) for part in split.outputs]
        pairs = [pair for pair in found if pair is not None]
        if len(pairs) < len(found) or len({_heads_of(pair[1])[1] for pair in pairs}) != 1:
            continue
        sizes = [_heads_of(transpose)[0] for _, transpose in pairs]
        width = _heads_of(pairs[0][1])[1]
        heads = "_".join(map(str, sizes))
        dims = np.array([1, -1, sum(sizes), width], np.int64)
        tape = ir.tape.Tape()
        together = tape.op("Reshape", [rows, store.constant(f"heads_{heads}_{width}", dims)])
        together = tape.op("Transpose", [together], {"perm": _HEADS_FIRST})
        cuts = store.constant(f"cuts_{heads}", np.array(sizes, np.int64))
        parts = tape.op_multi_out("Split", [together, cuts], {"axis": 1}, num_outputs=len(sizes))
        old = [transpose.outputs[0] for _, transpose in pairs]
        nodes = [split, *(node for pair in pairs for node in pair)]
        ir.convenience.replace_nodes_and_values(graph, split, nodes, tape.nodes, old, list(parts))
        num_changed += 1
    return num_changed


def _reshaped_and_transposed(part: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """Return the nodes that make (1, h, S, D) of a part (1, S, h*D), None if others read it."""
    nodes: list[ir.Node] = []
    for op_type in ("Reshape", "Transpose"):
        uses = list(part.uses())
        if len(uses) != 1 or uses[0].node.op_type != op_type or uses[0].idx != 0:
            return None
        nodes.append(uses[0].node)
        part = nodes[-1].outputs[0]
    reshape, transpose = nodes
    if list(transpose.attributes.get_ints("perm", ())) != _HEADS_FIRST or part.is_graph_output():
        return None
    shape = part.shape
    is_known = (
        shape is not None
        and len(shape) == 4
        and all(isinstance(shape[axis], int) for axis in (1, 3))
    )
    return (reshape, transpose) if is_known else None


def _heads_of(transpose: ir.Node) -> tuple[int, int]:
    """Return h and D of the output of a Transpose, (1, h, S, D)."""
    return known_heads_and_width(transpose.outputs[0])
