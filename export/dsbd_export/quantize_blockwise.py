"""Weights alone as int8 or int4 in blocks of 32 inputs: com.microsoft's MatMulNBits.

``accuracy_level`` 4 lets ONNX Runtime quantize the rows on the fly, block by block, and multiply
integers; at level 0 int8 is a hundred times slower on a CPU. The weights shrink; the time of a
call grows with its rows, so on a CPU speculation gains less than with ``quantize_dynamic``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.integer_weights import BLOCK_SIZE, block_integers, blocks_of, pack_nibbles
from dsbd_export.stored_tensors import Store, replace_node
from dsbd_export.weighted_layers import Linear, shape_of

MICROSOFT_DOMAIN = "com.microsoft"
_ACCURACY_LEVEL = 4


class BlockwiseQuantizer:
    """Rewrites products and embeddings of one graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._store = Store(graph)

    def quantize_linear(self, linear: Linear, bits: int) -> None:
        """Replace a product by one MatMulNBits, and an Add where it has a bias."""
        by_output = linear.is_stored_by_output
        num_outputs, num_inputs = shape_of(linear.weight)[:: 1 if by_output else -1]
        inputs = [
            linear.rows,
            self._integers(linear.weight, bits, by_output=by_output),
            self._scales(linear.weight, bits, by_output=by_output),
        ]
        if bits == 4:
            inputs.append(self._zero_points(linear.weight, by_output=by_output))
        attributes = {
            "K": num_inputs,
            "N": num_outputs,
            "bits": bits,
            "block_size": BLOCK_SIZE,
            "accuracy_level": _ACCURACY_LEVEL,
        }
        tape = ir.tape.Tape()
        result = tape.op("MatMulNBits", inputs, attributes, domain=MICROSOFT_DOMAIN)
        if linear.bias is not None:
            result = tape.op("Add", [result, linear.bias])
        replace_node(self._graph, linear.node, tape, result)

    def quantize_embedding(self, node: ir.Node) -> None:
        """Replace a Gather of tokens by one of their int8 blocks, which are scaled afterwards.

        The blocks have the form that MatMulNBits reads, so a tied head shares them.
        """
        weight, token_ids = node.inputs[0], node.inputs[1]
        assert weight is not None and weight.dtype is not None  # as find_embeddings promises
        to_float = {"to": weight.dtype}
        zero_point = self._store.constant(
            f"zero_point.{weight.dtype.name}", np.array(128, weight.dtype.numpy())
        )
        tape = ir.tape.Tape()
        blocks = tape.op("Gather", [self._integers(weight, 8), token_ids])  # (1, S, blocks, 32)
        blocks = tape.op("Sub", [tape.op("Cast", [blocks], to_float), zero_point])
        scales = tape.op("Gather", [self._scales(weight, 8), token_ids])  # (1, S, blocks)
        last_axis = self._store.constant("last_axis", np.array([-1], np.int64))
        blocks = tape.op("Mul", [blocks, tape.op("Unsqueeze", [scales, last_axis])])
        flat = self._store.constant("flat", np.array([0, 0, -1], np.int64))
        result = tape.op("Reshape", [blocks, flat])
        hidden_size = shape_of(weight)[1]
        if hidden_size % BLOCK_SIZE:
            start = self._store.constant("start", np.array([0], np.int64))
            stop = self._store.constant("hidden_size", np.array([hidden_size], np.int64))
            result = tape.op("Slice", [result, start, stop, last_axis])
        replace_node(self._graph, node, tape, result)

    def _integers(self, weight: ir.Value, bits: int, *, by_output: bool = True) -> ir.Value:
        def integers(values: NDArray[Any]) -> NDArray[Any]:
            values = values if by_output else values.T
            return block_integers(values, blocks_of(values, bits), bits)

        shape = (*_grid(weight, by_output), BLOCK_SIZE * bits // 8)
        return self._store.derived(weight, f"int{bits}", integers, ir.DataType.UINT8, shape)

    def _scales(self, weight: ir.Value, bits: int, *, by_output: bool = True) -> ir.Value:
        assert weight.dtype is not None  # weights have a type
        dtype = weight.dtype

        def scales(values: NDArray[Any]) -> NDArray[Any]:
            return blocks_of(values if by_output else values.T, bits).scales.astype(dtype.numpy())

        return self._store.derived(weight, "scales", scales, dtype, _grid(weight, by_output))

    def _zero_points(self, weight: ir.Value, *, by_output: bool) -> ir.Value:
        def zero_points(values: NDArray[Any]) -> NDArray[Any]:
            return pack_nibbles(blocks_of(values if by_output else values.T, 4).zero_points)

        num_outputs, num_blocks = _grid(weight, by_output)
        shape = (num_outputs, -(-num_blocks // 2))
        return self._store.derived(weight, "zero_points", zero_points, ir.DataType.UINT8, shape)


def _grid(weight: ir.Value, by_output: bool) -> tuple[int, int]:
    """Return the number of outputs and the number of blocks of their inputs."""
    num_outputs, num_inputs = shape_of(weight)[:: 1 if by_output else -1]
    return num_outputs, -(-num_inputs // BLOCK_SIZE)
