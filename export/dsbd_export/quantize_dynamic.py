"""W8A8: int8 weights by output channel, int8 activations by row, as ONNX's own operators.

    scale = max|row| / 127                       each row for itself, so no row depends on another
    uint8 = QuantizeLinear(row / scale), zero point 128
    row @ weight = MatMulInteger(uint8, int8) * scale * weight scale

Products of integers are exact, so the result of a row is the same bit for bit whatever rows
accompany it; ``exact_attention`` does the same for attention. Products that share their rows
(query, key and value; gate and up) share the integers.

On x86 without VNNI (before Ice Lake and Zen 4) ONNX Runtime multiplies uint8 by int8 with
VPMADDUBSW, whose sums of two products saturate at 16 bits. There the runtime sets the session
option ``session.x64quantprecision=1``, which turns the weights into uint8: calls of 150 M
parameters then take 0.4 to 0.8 times those in fp32 at 1 to 20 rows, without VNNI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.outliers import Outliers, key_of
from dsbd_export.weighted_layers import Linear, Store, replace_node, shape_of, weight_chunks

_NO_CHANNELS = np.arange(0)
_SMALLEST_SCALE = 1e-30  # a row of zeros must not be divided by zero


@dataclass(frozen=True)
class QuantizedRows:
    """Rows as uint8 around 128, (..., in), and their scales, (..., 1) float32."""

    integers: ir.Value
    scales: ir.Value


class DynamicQuantizer:
    """Rewrites products and embeddings of one graph."""

    def __init__(self, graph: ir.Graph, outliers: Outliers) -> None:
        """Take a graph, and the channels of its products that stay in fp32."""
        self._graph = graph
        self._outliers = outliers
        self.num_kept = 0
        self._store = Store(graph)
        self._rows: dict[tuple[ir.Value, bytes], QuantizedRows] = {}

    def quantize_linear(self, linear: Linear, *, is_shared: bool) -> None:
        """Replace a product; ``is_shared``: an embedding reads the same weight, (out, in)."""
        kept = self._kept_channels(linear)
        rows = self._quantized_rows(linear, kept)
        tape = ir.tape.Tape()
        integers, scales = self._weight(linear, tape, is_shared)
        products = tape.op("MatMulInteger", [rows.integers, integers, self._zero_point()])
        result = tape.op("Cast", [products], {"to": ir.DataType.FLOAT})
        result = tape.op("Mul", [tape.op("Mul", [result, rows.scales]), scales])
        if len(kept):
            result = tape.op("Add", [result, self._kept_product(linear, kept, tape)])
        if linear.bias is not None:
            result = tape.op("Add", [result, linear.bias])
        replace_node(self._graph, linear.node, tape, result)

    def quantize_embedding(self, node: ir.Node) -> None:
        """Replace a Gather of tokens: the int8 rows of the tokens times their scales."""
        weight, token_ids = node.inputs[0], node.inputs[1]
        assert weight is not None  # as find_embeddings promises
        tape = ir.tape.Tape()
        found = tape.op("Gather", [self._integers(weight, -1), token_ids], {"axis": 0})
        found = tape.op("Cast", [found], {"to": ir.DataType.FLOAT})
        scales = tape.op("Gather", [self._scales(weight, -1), token_ids], {"axis": 0})
        scales = tape.op("Unsqueeze", [scales, self._last_axis()])
        replace_node(self._graph, node, tape, tape.op("Mul", [found, scales]))

    def _kept_channels(self, linear: Linear) -> NDArray[np.int64]:
        """Return the channels of a product that stay in fp32, increasing."""
        weight = linear.weight.const_value
        if linear.num_experts or not self._outliers or weight is None:
            return _NO_CHANNELS
        values = weight.numpy()
        first = values[:1] if linear.is_stored_by_output else values[:, :1].T
        return self._outliers.get(key_of(first), _NO_CHANNELS)

    def _kept_product(
        self, linear: Linear, kept: NDArray[np.int64], tape: ir.tape.Tape
    ) -> ir.Value:
        """Return the rows' kept channels times their weights, (..., out) float32."""
        self.num_kept += len(kept)
        *_, first, second = shape_of(linear.weight)
        num_outputs = first if linear.is_stored_by_output else second

        def of_kept(values: NDArray[Any]) -> NDArray[Any]:
            found = values[:, kept].T if linear.is_stored_by_output else values[kept]
            return np.ascontiguousarray(found, dtype=np.float32)

        weight = self._store.derived(
            linear.weight, "kept", of_kept, ir.DataType.FLOAT, (len(kept), num_outputs)
        )
        channels = self._store.constant(f"kept.{linear.weight.name}", kept)
        rows = tape.op("Gather", [linear.rows, channels], {"axis": -1})
        return tape.op("MatMul", [rows, weight])

    def _quantized_rows(self, linear: Linear, kept: NDArray[np.int64]) -> QuantizedRows:
        """Return the quantized rows of a product, made where the first product needs them.

        kept: channels that are zero in them.
        """
        rows, key = linear.rows, (linear.rows, kept.tobytes())
        if key not in self._rows:
            tape = ir.tape.Tape()
            if len(kept):
                is_other = np.ones(self._in_features(linear), np.float32)
                is_other[kept] = 0
                others = self._store.constant(f"others.{linear.weight.name}", is_other)
                rows = tape.op("Mul", [rows, others])
            per_step = self._store.constant("one_127th", np.array(1 / 127, np.float32))
            smallest = self._store.constant("smallest", np.array(_SMALLEST_SCALE, np.float32))
            one = self._store.constant("one", np.array(1, np.float32))
            magnitudes = tape.op("Abs", [rows])
            largest = tape.op("ReduceMax", [magnitudes, self._last_axis()], {"keepdims": 1})
            if linear.may_lack_rows:
                # Without rows onnxruntime 1.31 gives (0, in) instead of (0, 1).
                zero, step = (
                    self._store.constant(f"to_{n}", np.array([n], np.int64)) for n in (0, 1)
                )
                largest = tape.op("Slice", [largest, zero, step, self._last_axis()])
            scales = tape.op("Max", [tape.op("Mul", [largest, per_step]), smallest])
            scaled = tape.op("Div", [rows, scales])
            integers = tape.op("QuantizeLinear", [scaled, one, self._zero_point()])
            self._graph.insert_before(linear.node, tape.nodes)
            self._rows[key] = QuantizedRows(integers, scales)
        return self._rows[key]

    def _in_features(self, linear: Linear) -> int:
        return shape_of(linear.weight)[-1 if linear.is_stored_by_output else -2]

    def _weight(
        self, linear: Linear, tape: ir.tape.Tape, is_shared: bool
    ) -> tuple[ir.Value, ir.Value]:
        """Return the integers ([E,] in, out) and their scales, (out,) or (E, 1, out)."""
        in_axis = -1 if linear.is_stored_by_output else -2
        scales = self._scales(linear.weight, in_axis)
        if not is_shared:
            return self._integers(linear.weight, in_axis, swap=linear.is_stored_by_output), scales
        # ONNX Runtime turns the constant around once, when it opens the graph.
        stored = self._integers(linear.weight, in_axis)
        return tape.op("Transpose", [stored], {"perm": [1, 0]}), scales

    def _integers(self, weight: ir.Value, in_axis: int, *, swap: bool = False) -> ir.Value:
        """Return the int8 weight as it is stored, or with its last two axes swapped."""
        *experts, first, second = shape_of(weight)

        def integers(values: NDArray[Any]) -> NDArray[Any]:
            found = channel_integers(values, in_axis)
            return np.ascontiguousarray(np.swapaxes(found, -1, -2)) if swap else found

        shape = (*experts, second, first) if swap else (*experts, first, second)
        return self._store.derived(weight, "int8", integers, ir.DataType.INT8, shape)

    def _scales(self, weight: ir.Value, in_axis: int) -> ir.Value:
        """Return the scales of the output channels, (out,) or (E, 1, out)."""
        *experts, first, second = shape_of(weight)
        num_outputs = first if in_axis == -1 else second
        shape = (*experts, 1, num_outputs) if experts else (num_outputs,)

        def scales(values: NDArray[Any]) -> NDArray[Any]:
            return channel_scales(values, in_axis).reshape(shape)

        return self._store.derived(weight, "scales", scales, ir.DataType.FLOAT, shape)

    def _zero_point(self) -> ir.Value:
        return self._store.constant("zero_point", np.array(128, np.uint8))

    def _last_axis(self) -> ir.Value:
        return self._store.constant("last_axis", np.array([-1], np.int64))


def channel_scales(weight: NDArray[Any], in_axis: int) -> NDArray[np.float32]:
    """Return the largest magnitude along ``in_axis`` over 127, that axis kept with size 1.

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
