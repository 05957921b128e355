"""Quantization of a captured graph's weights, one after the other while the graph is saved.

| | int8-dynamic | int8 | int4 |
|---|---|---|---|
| products with a matrix | W8A8 | blocks of 8 bits | blocks of 4 bits |
| the head | W8A8 | blocks of 8 bits | blocks of 8 bits |
| embedding of tokens | int8 by row | blocks of 8 bits | blocks of 8 bits |
| experts (batched products) | W8A8 | unchanged | unchanged |
| routers to experts, other embeddings, norms, biases, attention, caches | unchanged | | |

A head that shares the embedding's weight shares its integers: they are stored once.

W8A8: int8 weights per output channel, int8 activations per row, by ONNX's standard operators.

    largest = max|row|                           per row, so no row depends on another
    uint8 = QuantizeLinear(row, largest / 127), zero point 128
    row @ weight = DequantizeLinear(MatMulInteger(uint8, int8), largest) * weight scale / 127

Rows are (1, S, in), so both operators apply scales along axis 1. Rows of another or unknown shape
are divided by ``largest``, and the products are multiplied by it. Products of integers are exact,
so a row's result does not depend on other rows of the call.

On x86 without VNNI (before Ice Lake and Zen 4) ONNX Runtime multiplies uint8 by int8 with
VPMADDUBSW, whose sums of two products saturate at 16 bits. There the runtime sets the session
option ``session.x64quantprecision=1``, which turns the weights into uint8.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import PassManager, common

from dsbd_export.config import MICROSOFT_DOMAIN
from dsbd_export.passes.weighted_layers import (
    Linear,
    Store,
    find_embeddings,
    find_linears,
    replace_node,
    shape_of,
    weight_chunks,
)
from dsbd_export.quantization.equalize import NOTHING_EQUALIZED, EqualizedProducts, Equalizer
from dsbd_export.quantization.quantize_blockwise import BlockwiseQuantizer, block_size
from dsbd_export.quantization.row_forms import FormChoice, RowsOfProducts
from dsbd_runtime.bundle_files.manifest import INT4_SYMMETRIC

_STEPS, _ZERO_POINT = np.float32(127), np.uint8(128)


@dataclass(frozen=True)
class QuantizedRows:
    """Rows as uint8 around 128."""

    integers: ir.Value  # (1, S, in), or (..., in)
    largest: ir.Value  # the value that 127 represents, (S,) float32, or (..., 1)
    has_axis: bool


class DynamicQuantizer:
    """Rewrites products and embeddings of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._store = Store(graph)
        self._rows: dict[ir.Value, QuantizedRows] = {}
        self._points: dict[str, ir.Value] = {}  # see ``_zero_points``

    def quantize_linear(self, linear: Linear, *, is_shared: bool) -> None:
        """Replace a product; ``is_shared``: an embedding reads the same weight, (out, in)."""
        rows = self._quantized_rows(linear)
        tape = ir.tape.Tape()
        integers, steps = self._weight(linear, tape, is_shared)
        products = tape.op("MatMulInteger", [rows.integers, integers, self._zero_point()])
        if rows.has_axis:
            result = tape.op("DequantizeLinear", [products, rows.largest], {"axis": 1})
        else:
            result = tape.op("Cast", [products], {"to": ir.DataType.FLOAT})
            result = tape.op("Mul", [result, rows.largest])
        result = tape.op("Mul", [result, steps])
        if linear.bias is not None:
            result = tape.op("Add", [result, linear.bias])
        replace_node(self._graph, linear.node, tape, result)

    def quantize_embedding(self, node: ir.Node) -> None:
        weight, token_ids = node.inputs[0], node.inputs[1]
        assert weight is not None  # find_embeddings has checked
        tape = ir.tape.Tape()
        rows = tape.op("Gather", [self._integers(weight, -1), token_ids], {"axis": 0})
        rows = tape.op("Cast", [rows], {"to": ir.DataType.FLOAT})
        scales = tape.op("Gather", [self._scales(weight, -1), token_ids], {"axis": 0})
        scales = tape.op("Unsqueeze", [scales, self._last_axis()])
        replace_node(self._graph, node, tape, tape.op("Mul", [rows, scales]))

    def _quantized_rows(self, linear: Linear) -> QuantizedRows:
        """Return the quantized rows of a product; nodes precede the first such product."""
        rows = linear.rows
        if rows not in self._rows:
            tape = ir.tape.Tape()
            shape = rows.shape
            is_by_row = shape is not None and len(shape) == 3 and shape[0] == 1
            if is_by_row and not linear.may_lack_rows:
                self._rows[rows] = self._by_row(rows, tape)
            else:
                self._rows[rows] = self._by_last_axis(linear, tape)
            self._graph.insert_before(linear.node, tape.nodes)
        return self._rows[rows]

    def _by_row(self, rows: ir.Value, tape: ir.tape.Tape) -> QuantizedRows:
        """Return quantized rows, (1, S, in), with scales along axis 1."""
        others = self._store.constant("all_but_rows", np.array([0, 2], np.int64))
        largest = tape.op("ReduceMax", [tape.op("Abs", [rows]), others], {"keepdims": 0})
        # In a row of zeros, 0 / 0 becomes some integer, whose products are multiplied by 0.
        inputs = [rows, tape.op("Mul", [largest, self._step()]), self._zero_points(rows, tape)]
        return QuantizedRows(tape.op("QuantizeLinear", inputs, {"axis": 1}), largest, has_axis=True)

    def _by_last_axis(self, linear: Linear, tape: ir.tape.Tape) -> QuantizedRows:
        """Return quantized rows of any shape, divided by their largest; there may be no rows."""
        rows = linear.rows
        magnitudes = tape.op("Abs", [rows])
        largest = tape.op("ReduceMax", [magnitudes, self._last_axis()], {"keepdims": 1})
        if linear.may_lack_rows:
            # Without rows onnxruntime 1.31 gives (0, in) instead of (0, 1).
            zero, one = (self._store.constant(f"to_{n}", np.array([n], np.int64)) for n in (0, 1))
            largest = tape.op("Slice", [largest, zero, one, self._last_axis()])
        inputs = [tape.op("Div", [rows, largest]), self._step(), self._zero_point()]
        return QuantizedRows(tape.op("QuantizeLinear", inputs), largest, has_axis=False)

    def _zero_points(self, rows: ir.Value, tape: ir.tape.Tape) -> ir.Value:
        """Return the zero point of every row, (S,) uint8; shared by rows of the same number."""
        assert rows.shape is not None  # the caller has checked
        number = str(rows.shape[1])
        if number not in self._points:
            shape = tape.op("Shape", [rows], {"start": 1, "end": 2})
            value = ir.tensor(np.array([_ZERO_POINT]))
            self._points[number] = tape.op("ConstantOfShape", [shape], {"value": value})
        return self._points[number]

    def _weight(
        self, linear: Linear, tape: ir.tape.Tape, is_shared: bool
    ) -> tuple[ir.Value, ir.Value]:
        """Return the integers ([E,] in, out), and scales divided by 127, (out,) or (E, 1, out)."""
        in_axis = -1 if linear.is_stored_by_output else -2
        steps = self._scales(linear.weight, in_axis, _STEPS)
        if not is_shared:
            return self._integers(linear.weight, in_axis, swap=linear.is_stored_by_output), steps
        # ONNX Runtime transposes the constant once, when it opens the graph.
        stored = self._integers(linear.weight, in_axis)
        return tape.op("Transpose", [stored], {"perm": [1, 0]}), steps

    def _integers(self, weight: ir.Value, in_axis: int, *, swap: bool = False) -> ir.Value:
        """Return the int8 weight as it is stored, or with its last two axes swapped."""
        *experts, first, second = shape_of(weight)

        def integers(values: NDArray[Any]) -> NDArray[Any]:
            quantized = channel_integers(values, in_axis)
            return np.ascontiguousarray(np.swapaxes(quantized, -1, -2)) if swap else quantized

        shape = (*experts, second, first) if swap else (*experts, first, second)
        return self._store.derived(weight, "int8", integers, ir.DataType.INT8, shape)

    def _scales(
        self, weight: ir.Value, in_axis: int, divisor: np.float32 | None = None
    ) -> ir.Value:
        """Return the output channels' scales, (out,) or (E, 1, out), divided by ``divisor``."""
        *experts, first, second = shape_of(weight)
        num_outputs = first if in_axis == -1 else second
        shape = (*experts, 1, num_outputs) if experts else (num_outputs,)

        def scales(values: NDArray[Any]) -> NDArray[Any]:
            channel = channel_scales(values, in_axis).reshape(shape)
            return channel if divisor is None else channel / divisor

        name = "scales" if divisor is None else "steps"
        return self._store.derived(weight, name, scales, ir.DataType.FLOAT, shape)

    def _zero_point(self) -> ir.Value:
        return self._store.constant("zero_point", np.array(_ZERO_POINT))

    def _step(self) -> ir.Value:
        return self._store.constant("step", np.array(1 / _STEPS, np.float32))

    def _last_axis(self) -> ir.Value:
        return self._store.constant("last_axis", np.array([-1], np.int64))


def channel_scales(weight: NDArray[Any], in_axis: int) -> NDArray[np.float32]:
    """Return the largest magnitude along ``in_axis`` divided by 127; the axis is kept with size 1.

    [[1, -254], [127, 2]] along axis 1 gives [[2], [1]].
    """
    largest = np.maximum(
        weight.max(in_axis, keepdims=True), -weight.min(in_axis, keepdims=True)
    ).astype(np.float32)
    return np.where(largest > 0, largest / np.float32(127), np.float32(1))


def channel_integers(weight: NDArray[Any], in_axis: int) -> NDArray[np.int8]:
    """Return the weight divided by its ``channel_scales`` and rounded, int8 of the same shape."""
    scales = np.broadcast_to(channel_scales(weight, in_axis), weight.shape)
    integers = np.empty(weight.shape, np.int8)
    for rows in weight_chunks(weight.shape):
        integers[rows] = np.rint(weight[rows] / scales[rows])
    return integers


_BITS = {"int8": 8, "int4": 4, INT4_SYMMETRIC: 4}
_HEAD_BITS = 8
# For kinds that round rows to int8; in int4 the weights lose more than any form could save.
_CHOICES = {
    "int8-dynamic": FormChoice(),
    "int8": FormChoice(shared=block_size(8)),
}
_MICROSOFT_OPSET = 1


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Counts of products and embeddings that were quantized, and of products that were not."""

    num_linears: int
    num_embeddings: int
    num_routers: int
    num_expert_products: int
    equalized: EqualizedProducts = NOTHING_EQUALIZED

    def __str__(self) -> str:
        done = f"{self.num_linears} products and {self.num_embeddings} embeddings quantized"
        counts = {"routers": self.num_routers, "expert products": self.num_expert_products}
        if kept := [f"{count} {name}" for name, count in counts.items() if count]:
            done += f", {' and '.join(kept)} left as they are"
        return done if self.equalized == NOTHING_EQUALIZED else f"{done}; {self.equalized}"


def quantize_graph(
    model: ir.Model, kind: str, *, is_exact: bool, rows: RowsOfProducts | None = None
) -> Quantized:
    """Quantize ``model`` in place; ``kind`` is one of ``QUANTIZED_FORMS``."""
    linears = find_linears(model.graph)
    others = [linear for linear in linears if not linear.is_router]
    embeddings = find_embeddings(model.graph)
    num_routers, num_left, equalized = len(linears) - len(others), 0, NOTHING_EQUALIZED
    weights = _weights(others, embeddings)
    if (choice := _CHOICES.get(kind)) is not None:
        equalizer = Equalizer(model.graph, others, embeddings, rows or {}, choice)
        others, embeddings = equalizer.equalize(), equalizer.embeddings
        equalized = equalizer.done
        weights += _weights(others, embeddings)
    if kind == "int8-dynamic":  # its products are exact in any case
        looked_up = {node.inputs[0] for node in embeddings}
        dynamic = DynamicQuantizer(model.graph)
        for linear in others:
            dynamic.quantize_linear(linear, is_shared=linear.weight in looked_up)
        for node in embeddings:
            dynamic.quantize_embedding(node)
    else:
        num_left = _blockwise(model, others, embeddings, kind, is_exact=is_exact)
    PassManager([common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass()])(model)
    for weight in weights:  # only tensors derived from removed weights still refer to them
        if weight is not None and weight.name not in model.graph.initializers:
            weight.const_value = None
    return Quantized(
        num_linears=len(others) - num_left,
        num_embeddings=len(embeddings),
        num_routers=num_routers,
        num_expert_products=num_left,
        equalized=equalized,
    )


def _weights(linears: list[Linear], embeddings: list[ir.Node]) -> list[ir.Value | None]:
    return [*(linear.weight for linear in linears), *(node.inputs[0] for node in embeddings)]


def _blockwise(
    model: ir.Model, linears: list[Linear], embeddings: list[ir.Node], kind: str, *, is_exact: bool
) -> int:
    """Quantize all products except experts'; return how many were left unchanged."""
    model.graph.opset_imports[MICROSOFT_DOMAIN] = _MICROSOFT_OPSET
    matrices = [linear for linear in linears if not linear.num_experts]
    quantizer = BlockwiseQuantizer(
        model.graph, is_exact=is_exact, is_symmetric=kind == INT4_SYMMETRIC
    )
    for linear in matrices:
        quantizer.quantize_linear(linear, _HEAD_BITS if linear.is_head else _BITS[kind])
    for node in embeddings:
        quantizer.quantize_embedding(node)
    return len(linears) - len(matrices)
