"""WebGPU's form of a graph: only operators that ONNX Runtime's WebGPU plug-in 0.4.0 has.

| missing | in its place |
|---|---|
| TensorScatter | ScatterElements, with indices that are made once a call |
| Attention | MatMul, Add, Softmax, MatMul; query heads of a key head are rows of one head |
| Cos, Sin | tables of the rotary angles, a row for each position of the context |
| Round | Floor(x + 0.5) |
| Or | the sum of both as integers, compared with 0 |
| sums in double (exact attention) | sums of high and low bits of the integers, each exact in fp32 |

The top-k head of this form is in ``parts.head``: LogSoftmax in fp32 is missing too, and
ReduceLogSumExp overflows. The plug-in has most operators of int64 with its option ``enableInt64``.
A bundle of this form runs on the CPU provider as well, so the parity gate judges it there.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import PassManager, common

from dsbd_export.config import CUDA, PORTABLE, WEBGPU
from dsbd_export.errors import ExportError
from dsbd_export.passes.cuda_graph import add_masks
from dsbd_export.passes.optimize import group_query_heads, known_heads_and_width
from dsbd_export.passes.weighted_layers import replace_node
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.attention_rows import POSITION_IDS, SRC_ROWS

LACKING = frozenset({
    "Attention", "Cos", "DequantizeLinear", "DynamicQuantizeLinear", "IsNaN", "LogSoftmax",
    "MatMulInteger", "Or", "QuantizeLinear", "ReduceLogSumExp", "Round", "Sin", "TensorScatter",
})  # fmt: skip
"""Operators that the plug-in lacks, or has with wrong results, among those of other forms."""
_COPYING = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_ACCURACY_LEVEL = 1  # of MatMulNBits: at 4 the CPU provider rounds rows to int8, WebGPU does not
_LOW_BITS = 7  # half of those of the weights of exact attention: 2^17 rows of either fit 24 bits
_MOST_ROWS = 2**17


def use_webgpu_operators(model: ir.Model, context_length: int) -> str:
    """Give a graph WebGPU's form in place; return what was done, as progress.

    Raises ExportError if it has an operator that the plug-in lacks.
    """
    num_grouped, num_masks = group_query_heads(model), add_masks(model)
    num_tables = tabulate_angles(model, context_length)
    write_by_elements(model, POSITION_IDS)
    num_replaced = sum([_replace(node, context_length) for node in list(model.graph)])
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", _ACCURACY_LEVEL)
    compute_outputs(model)
    _lift_constants(model)
    PassManager([
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
    ])(model)  # fmt: skip
    check_operators(model)
    return (
        f"{num_grouped} attention nodes grouped, {num_masks} masks are added, {num_tables} tables "
        f"of angles, {num_replaced} other operators replaced"
    )


def check_operators(model: ir.Model) -> None:
    """Raise ExportError if a graph has operators that the plug-in lacks."""
    found = {node.op_type for node in model.graph if node.op_type in LACKING}
    if any(node.attributes.get_int("to", 0) == ir.DataType.DOUBLE for node in model.graph):
        found.add("Cast to double")
    if found:
        raise ExportError(
            f"form={WEBGPU!r} has no operators in place of {', '.join(sorted(found))}; use form="
            f"{PORTABLE!r}, or form={CUDA!r} for a GPU of NVIDIA"
        )


def read_rows_of_sources(file: Path) -> None:
    """Give a prune graph WebGPU's form: the rows that it writes are those of further inputs.

    ``source.{i}.x`` are the caches to read, ``past_key_values.{i}.x`` those that are written. They
    are the same buffers if rows are moved; if a cache grows, the old and the new one.
    """
    model = ir.load(file)
    graph = model.graph
    for node in [node for node in graph if node.op_type == "Gather"]:
        past = node.inputs[0]
        assert past is not None and past.name and past.shape is not None
        shape = ir.Shape([*past.shape[:2], "N", past.shape[3]])
        source = ir.Value(name=source_name(past.name), shape=shape, type=past.type)
        graph.inputs.append(source)
        node.replace_input_with(0, source)
    write_by_elements(model, SRC_ROWS)
    _lift_constants(model)
    ir.save(model, file)


def source_name(past: str) -> str:
    """Return the input of the prune graph with the rows to read, source.0.key for the key cache."""
    return past.replace("past_key_values", "source")


def write_by_elements(model: ir.Model, rows_input: str) -> None:
    """Write rows to caches by ScatterElements instead of TensorScatter, in place.

    rows_input: name of an input with as many int64 elements as rows are written.
    """
    graph = model.graph
    places: dict[tuple[int, int], ir.Value] = {}
    for node in [node for node in graph if node.op_type == "TensorScatter"]:
        cache, new, first = node.inputs
        assert cache is not None and new is not None and first is not None
        tape = ir.tape.Tape()
        size = known_heads_and_width(cache)
        if size not in places:
            places[size] = _element_places(tape, _input(graph, rows_input), first, *size)
        written = tape.op("ScatterElements", [cache, places[size], new], {"axis": 2})
        replace_node(graph, node, tape, written)


def _element_places(
    tape: ir.tape.Tape, counted: ir.Value, first: ir.Value, num_heads: int, width: int
) -> ir.Value:
    """Return the row of each element, (1, H, S, D) int32: ``first``, first + 1 and so on.

    Rows are counted by a running sum over ``counted``, S int64: the plug-in has no Shape.
    """
    rows = tape.op("Reshape", [counted, _constant(tape, [1, 1, -1, 1])])
    zeros = tape.op("Mul", [tape.op("Cast", [rows], {"to": ir.DataType.INT32}), _int32(tape, 0)])
    ones = tape.op("Add", [zeros, _int32(tape, 1)])
    numbers = tape.op("CumSum", [ones, _int32(tape, 2)], {"exclusive": 1})
    places = tape.op("Add", [numbers, tape.op("Cast", [first], {"to": ir.DataType.INT32})])
    return tape.op("Add", [places, _constant(tape, np.zeros((1, num_heads, 1, width), np.int32))])


def tabulate_angles(model: ir.Model, context_length: int) -> int:
    """Read values that cosines and sines of positions make from tables; return their number."""
    graph = model.graph
    positions = _input(graph, POSITION_IDS)
    found = _rotary_values(graph, positions)
    if not found:
        return 0
    part = ir.convenience.extract(graph, [positions], found)
    copy = ir.Model(part, ir_version=model.ir_version)
    session = import_ort().InferenceSession(
        ir.to_proto(copy).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    tables = session.run(None, {POSITION_IDS: np.arange(context_length, dtype=np.int64)[None]})
    for value, table, output in zip(found, tables, session.get_outputs(), strict=True):
        axis = _row_axis(output.shape)
        tape = ir.tape.Tape()
        rows = tape.op("Reshape", [positions, _constant(tape, [-1])])
        read = tape.op("Gather", [_constant(tape, table), rows], {"axis": axis})
        node = value.producer()
        assert node is not None  # as it is no input
        replace_node(graph, node, tape, read)
    return len(found)


def _rotary_values(graph: ir.Graph, positions: ir.Value) -> list[ir.Value]:
    """Return values that depend on positions alone, by a Cos or Sin, and that other nodes read."""
    of_positions, rotary = {positions}, list[ir.Value]()
    for node in graph:
        read = [value for value in node.inputs if value and not value.is_initializer()]
        if read and of_positions.issuperset(read):
            of_positions.update(node.outputs)
            if node.op_type in ("Cos", "Sin") or not {*rotary}.isdisjoint(read):
                rotary.extend(node.outputs)
    return [
        value
        for value in rotary
        if not of_positions.issuperset(use.node.outputs[0] for use in value.uses())
    ]


def _row_axis(shape: Sequence[int | str | None]) -> int:
    """Return the axis of the rows, one for each position: the only one of unknown size."""
    axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(axes) != 1:
        raise ExportError(
            f"form={WEBGPU!r}: rotary angles of shape {shape} are not one row for each position; "
            f"use form={PORTABLE!r}"
        )
    return axes[0]


def _replace(node: ir.Node, context_length: int) -> bool:
    """Replace a node by operators that the plug-in has; return whether it was one to replace."""
    tape = ir.tape.Tape()
    if node.op_type == "Attention":
        result = _attended(tape, node)
    elif node.op_type == "Or":
        counts = [tape.op("Cast", [each], {"to": ir.DataType.INT32}) for each in node.inputs]
        result = tape.op("Greater", [tape.op("Add", counts), _int32(tape, 0)])
    elif node.op_type == "Round":
        result = tape.op("Floor", [tape.op("Add", [node.inputs[0], _float(tape, 0.5)])])
    elif node.op_type == "ReduceSum" and (integers := _before_double(node.inputs[0])) is not None:
        result = _sum_in_parts(tape, node, integers, context_length)
    else:
        return False
    assert node.graph is not None
    replace_node(node.graph, node, tape, result)
    return True


def _attended(tape: ir.tape.Tape, node: ir.Node) -> ir.Value:
    """Return softmax(scale q k^T + mask) v; query and key have the same heads, (1, H, rows, D)."""
    query, key, value, mask = node.inputs[:4]
    assert query is not None and key is not None and key.dtype is not None
    _, width = known_heads_and_width(key)
    scale = np.array(node.attributes.get_float("scale", width**-0.5), key.dtype.numpy())
    turned = tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})
    scores = tape.op("MatMul", [tape.op("Mul", [query, _constant(tape, scale)]), turned])
    weights = tape.op("Softmax", [tape.op("Add", [scores, mask])], {"axis": -1})
    return tape.op("MatMul", [weights, value])


def _before_double(value: ir.Value | None) -> ir.Value | None:
    """Return the fp32 numbers that were cast to double, None for other values."""
    cast = None if value is None else value.producer()
    is_cast = cast is not None and cast.attributes.get_int("to", 0) == ir.DataType.DOUBLE
    return cast.inputs[0] if cast is not None and is_cast else None


def _sum_in_parts(
    tape: ir.tape.Tape, node: ir.Node, integers: ir.Value, context_length: int
) -> ir.Value:
    """Return the sum that double gives, rounded to fp32: 128 times that of w // 128, and the rest.

    integers: weights of ``exact_attention``, at most 2^14.
    """
    if context_length > _MOST_ROWS:
        raise ExportError(
            f"form={WEBGPU!r} with attention='exact' adds up {_MOST_ROWS} rows at most, the "
            f"context is {context_length}; use max_context={_MOST_ROWS}, or attention='fused'"
        )
    step, axes = _float(tape, 2.0**_LOW_BITS), node.inputs[1]
    high = tape.op("Floor", [tape.op("Mul", [integers, _float(tape, 2.0**-_LOW_BITS)])])
    low = tape.op("Sub", [integers, tape.op("Mul", [high, step])])
    sums = [tape.op("ReduceSum", [part, axes], {"keepdims": 1}) for part in (high, low)]
    return tape.op("Add", [tape.op("Mul", [sums[0], step]), sums[1]])


def compute_outputs(model: ir.Model) -> None:
    """Have outputs computed: others are copied, and a recorded call replays no copies."""
    for output in list(model.graph.outputs):
        node = output.producer()
        if node is None or node.op_type not in _COPYING:
            continue
        assert output.dtype is not None
        tape = ir.tape.Tape()
        copied = tape.op(node.op_type, node.inputs, node.attributes)
        one = _constant(tape, np.array(1, output.dtype.numpy()))
        replace_node(model.graph, node, tape, tape.op("Mul", [copied, one]))


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _lift_constants(model: ir.Model) -> None:
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _constant(tape: ir.tape.Tape, array: Sequence[int] | NDArray[np.generic]) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(np.asarray(array))})


def _int32(tape: ir.tape.Tape, number: int) -> ir.Value:
    return _constant(tape, np.array(number, np.int32))


def _float(tape: ir.tape.Tape, number: float) -> ir.Value:
    return _constant(tape, np.array(number, np.float32))
