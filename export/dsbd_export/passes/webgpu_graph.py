"""WebGPU's form of a graph: only operators that ONNX Runtime's WebGPU plug-in has.

* ScatterElements writes rows; its indices are computed once per call.
* Query heads that share a key head are rows of one head. Masks are numbers to add.
* Cosines and sines of positions are tables, with a row for each position of the context.
* ``webgpu_operators`` replaces single nodes.

The top-k head of this form is in ``parts.head``. The plug-in supports the remaining int64 operators
with its option ``enableInt64``. A bundle of this form also runs on the CPU provider, where the
parity gate checks it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassManager, common

from dsbd_export.errors import ExportError
from dsbd_export.passes.cuda_graph import add_masks
from dsbd_export.passes.optimize import group_query_heads, known_heads_and_width
from dsbd_export.passes.webgpu_operators import check_operators, constant, replace_operators
from dsbd_export.passes.weighted_layers import replace_node
from dsbd_runtime.bundle_files.manifest import PORTABLE, WEBGPU
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.attention.attention_rows import POSITION_IDS, SRC_ROWS
from dsbd_runtime.parts.attention.cache_entries import source_name

_COPYING = ("Identity", "Reshape", "ScatterElements", "Squeeze", "Unsqueeze")
_ACCURACY_LEVEL = (
    1  # of MatMulNBits: at level 4 the CPU provider rounds rows to int8, WebGPU does not
)


def use_webgpu_operators(model: ir.Model, context_length: int) -> str:
    """Convert a graph to WebGPU's form in place; return a line of progress.

    Raises ExportError if an operator remains that the plug-in lacks.
    """
    num_grouped, num_masks = group_query_heads(model), add_masks(model)
    num_tables = tabulate_angles(model, context_length)
    write_by_elements(model, POSITION_IDS)
    num_replaced = replace_operators(model, context_length)
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


def read_rows_of_sources(file: Path) -> None:
    """Convert a prune graph to WebGPU's form: the rows that it writes come from further inputs.

    ``source.{i}.x`` are the caches that are read, ``past_key_values.{i}.x`` the caches that are
    written. Both are the same buffer if rows are moved. If a cache grows, they are the old and the
    new buffer.
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


def write_by_elements(model: ir.Model, rows_input: str) -> None:
    """Write rows to caches by ScatterElements instead of TensorScatter, in place.

    rows_input: name of an int64 input with one element per written row.
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

    Rows are counted by a running sum over ``counted``, S int64, because the plug-in has no Shape.
    """
    rows = tape.op("Reshape", [counted, constant(tape, [1, 1, -1, 1])])
    zero, one, axis = (constant(tape, np.array(number, np.int32)) for number in range(3))
    zeros = tape.op("Mul", [tape.op("Cast", [rows], {"to": ir.DataType.INT32}), zero])
    numbers = tape.op("CumSum", [tape.op("Add", [zeros, one]), axis], {"exclusive": 1})
    places = tape.op("Add", [numbers, tape.op("Cast", [first], {"to": ir.DataType.INT32})])
    return tape.op("Add", [places, constant(tape, np.zeros((1, num_heads, 1, width), np.int32))])


def tabulate_angles(model: ir.Model, context_length: int) -> int:
    """Read cosines and sines of positions, and values derived from them, from tables.

    Returns the number of tables.
    """
    graph = model.graph
    positions = _input(graph, POSITION_IDS)
    values = _rotary_values(graph, positions)
    if not values:
        return 0
    part = ir.convenience.extract(graph, [positions], values)
    copy = ir.Model(part, ir_version=model.ir_version)
    session = import_ort().InferenceSession(
        ir.to_proto(copy).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    tables = session.run(None, {POSITION_IDS: np.arange(context_length, dtype=np.int64)[None]})
    for value, table, output in zip(values, tables, session.get_outputs(), strict=True):
        axis = _row_axis(output.shape)
        tape = ir.tape.Tape()
        rows = tape.op("Reshape", [positions, constant(tape, [-1])])
        read = tape.op("Gather", [constant(tape, table), rows], {"axis": axis})
        node = value.producer()
        assert node is not None  # a node computes it
        replace_node(graph, node, tape, read)
    return len(values)


def _rotary_values(graph: ir.Graph, positions: ir.Value) -> list[ir.Value]:
    """Return values that depend only on positions, through a Cos or Sin, and that others read."""
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
    """Return the axis of the rows, one per position: the only axis of unknown size."""
    axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(axes) != 1:
        raise ExportError(
            f"form={WEBGPU!r}: rotary angles of shape {shape} are not one row for each position; "
            f"use form={PORTABLE!r}"
        )
    return axes[0]


def compute_outputs(model: ir.Model) -> None:
    """Make kernels compute all outputs: others are copied, and recorded calls replay no copies."""
    for output in list(model.graph.outputs):
        node = output.producer()
        if node is None or node.op_type not in _COPYING or node.inputs[0] in model.graph.inputs:
            continue  # a cache is written in place
        assert output.dtype is not None
        tape = ir.tape.Tape()
        copied = tape.op(node.op_type, node.inputs, node.attributes)
        one = constant(tape, np.array(1, output.dtype.numpy()))
        replace_node(model.graph, node, tape, tape.op("Mul", [copied, one]))


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _lift_constants(model: ir.Model) -> None:
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
