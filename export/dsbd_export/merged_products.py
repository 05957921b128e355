"""Products of the same rows merged into one, their weights side by side.

    query, key, value = Split(rows @ [Wq, Wk, Wv])        and gate, up = Split(rows @ [Wg, Wu])

Each number is computed as before: a column of a product depends on the rows and on that column's
weights, and so do scales by channel and by block. What goes are calls of the engine's kernels, and
those that quantized products need around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from dsbd_export.weighted_layers import (
    Linear,
    Store,
    find_embeddings,
    find_linears,
    shape_of,
)


def merge_products(model: ir.Model) -> int:
    """Merge in place; return how many products are left of those that were merged."""
    graph = model.graph
    looked_up = {node.inputs[0] for node in find_embeddings(graph)}
    groups: dict[Hashable, list[Linear]] = defaultdict(list)
    for linear in find_linears(graph):
        if linear.is_head or linear.is_router or linear.num_experts or linear.weight in looked_up:
            continue
        form = linear.node.op_type, linear.is_stored_by_output, linear.bias is None
        groups[linear.rows, form, linear.weight.dtype].append(linear)
    merged = [group for group in groups.values() if len(group) > 1 and _may_merge(group)]
    store = Store(graph, "merged")
    for group in merged:
        _merge(graph, store, group)
    common.RemoveUnusedNodesPass()(model)
    return len(merged)


def _may_merge(group: Sequence[Linear]) -> bool:
    """Return whether each weight and bias is known and belongs to one product."""
    values = [value for linear in group for value in (linear.weight, linear.bias) if value]
    return len({*values}) == len(values) and all(value.is_initializer() for value in values)


def _merge(graph: ir.Graph, store: Store, group: Sequence[Linear]) -> None:
    """Put one product and a Split in the place of several products."""
    first = group[0]
    out_axis = 0 if first.is_stored_by_output else 1
    weights = [linear.weight for linear in group]
    sizes = [shape_of(weight)[out_axis] for weight in weights]
    tape = ir.tape.Tape()
    weight = store.joined(weights, out_axis)
    if first.node.op_type == "Gemm":
        biases = [linear.bias for linear in group if linear.bias is not None]
        inputs = [first.rows, weight, *([store.joined(biases, 0)] if biases else [])]
        attributes = {"transB": int(first.is_stored_by_output)}
        product = tape.op("Gemm", inputs, attributes)
    else:
        if first.is_stored_by_output:
            weight = tape.op("Transpose", [weight], {"perm": [1, 0]})
        product = tape.op("MatMul", [first.rows, weight])
    split = store.constant(f"sizes_{'_'.join(map(str, sizes))}", np.array(sizes, np.int64))
    parts = tape.op_multi_out("Split", [product, split], {"axis": -1}, num_outputs=len(sizes))
    nodes = [linear.node for linear in group]
    results = [node.outputs[0] for node in nodes]
    ir.convenience.replace_nodes_and_values(
        graph, first.node, nodes, tape.nodes, results, list(parts)
    )
