"""Products of the same rows merged into one product with concatenated weights.

    query, key, value = Split(rows @ [Wq, Wk, Wv])        and gate, up = Split(rows @ [Wg, Wu])

Each number is computed as before, and so are scales per channel and per block.

On a CPU, query, key and value are then transposed from rows by heads to heads by rows together,
before they are split: one transposition of (1, S, H + 2 Hkv, D) instead of three. This is not done
on CUDA. There, a Split into unequal parts has a direct kernel only for columns; otherwise it first
copies the sizes from the host, four times (counted by tests/cuda_binary).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from dsbd_export.passes.optimize import heads_and_width, known_heads_and_width
from dsbd_export.passes.weighted_layers import (
    Linear,
    Store,
    find_embeddings,
    find_linears,
    shape_of,
)

_HEADS_FIRST = [0, 2, 1, 3]


def merge_products(model: ir.Model) -> int:
    """Merge products in place; return the number of merged groups."""
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
    values = [value for linear in group for value in (linear.weight, linear.bias) if value]
    return len({*values}) == len(values) and all(value.is_initializer() for value in values)


def _merge(graph: ir.Graph, store: Store, group: Sequence[Linear]) -> None:
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


def transpose_before_split(graph: ir.Graph) -> int:
    """Transpose query, key and value heads of merged products at once; return the number changed.

    Families that normalize query and key heads in between are not changed.
    """
    store = Store(graph, "turned")
    num_changed = 0
    for split in list(graph):
        is_split = split.op_type == "Split" and split.attributes.get_int("axis", 0) == -1
        if not is_split or (rows := split.inputs[0]) is None:
            continue
        candidates = [_reshaped_and_transposed(part) for part in split.outputs]
        pairs = [pair for pair in candidates if pair is not None]
        old = [transpose.outputs[0] for _, transpose in pairs]
        shapes = [known_heads_and_width(heads) for heads in old]
        if len(pairs) < len(candidates) or len({width for _, width in shapes}) != 1:
            continue
        sizes, width = [number for number, _ in shapes], shapes[0][1]
        heads = "_".join(map(str, sizes))
        dims = np.array([1, -1, sum(sizes), width], np.int64)
        tape = ir.tape.Tape()
        together = tape.op("Reshape", [rows, store.constant(f"heads_{heads}_{width}", dims)])
        together = tape.op("Transpose", [together], {"perm": _HEADS_FIRST})
        cuts = store.constant(f"cuts_{heads}", np.array(sizes, np.int64))
        parts = tape.op_multi_out("Split", [together, cuts], {"axis": 1}, num_outputs=len(sizes))
        nodes = [split, *(node for pair in pairs for node in pair)]
        ir.convenience.replace_nodes_and_values(graph, split, nodes, tape.nodes, old, list(parts))
        num_changed += 1
    return num_changed


def _reshaped_and_transposed(part: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """Return the nodes that turn a part (1, S, h*D) into (1, h, S, D), None if others read it."""
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
    return None if heads_and_width(part) is None else (reshape, transpose)
