"""CUDA's form of a graph: ONNX Runtime's own operators, each of which replaces several kernels.

* ``Add`` and the ``RMSNormalization`` of its sum become ``SkipSimplifiedLayerNormalization``. It
  returns both the sum and the norm, so the residual stream is read once.
* Once per forward, masks are converted to numbers that are added to scores, in the attention's
  type. With a bool mask, every attention would do that again, and search for rows that see nothing.

A bundle of this form also runs on the CPU provider, which has these operators, but not in TensorRT.
"""

import onnx_ir as ir
from onnx_ir.passes import PassManager, common

from dsbd_export.config import MICROSOFT_DOMAIN
from dsbd_export.passes.optimize import added_mask

_MICROSOFT_OPSET = 1
_MASK_INPUT = 3  # index of Attention's input
_SUM_OUTPUT = 3  # index of SkipSimplifiedLayerNormalization's output


def use_cuda_operators(model: ir.Model) -> str:
    """Convert a graph to CUDA's form in place; return a line of progress."""
    num_norms = fuse_skipped_norms(model)
    num_masks = add_masks(model)
    PassManager([common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass()])(model)
    return f"{num_norms} norms take their sums, {num_masks} masks are added"


def fuse_skipped_norms(model: ir.Model) -> int:
    """Merge each RMSNormalization with the Add before it; return how many were merged."""
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
    """Return whether ``total`` adds two tensors (1, S, H) in the precision of ``norm``'s scale."""
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
    """Make every Attention add its mask as numbers; return how many masks were converted."""
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
