"""Weights alone as int8 or int4 in blocks of inputs: com.microsoft's MatMulNBits.

With ``accuracy_level`` 4, ONNX Runtime quantizes the rows on the fly, block by block, and
multiplies integers; at level 0, int8 is a hundred times slower on a CPU. A row's products then have
the same bits for any number of rows and threads. The exception is 4 bits on x86 without AVX-512,
for which an exact graph adds a row of zeros.

On CUDA, fp16 rows are multiplied directly with integers (``ep.cuda.fpa_intb_gemm``) if no block has
a zero point; otherwise a call of more than a few rows first dequantizes the whole weight. This
direct product has no kernel for blocks of 32 unless the number of inputs is a multiple of 64 (ONNX
Runtime 1.31.1 fails in the call). With blocks of 16 the weight is dequantized.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.config import MICROSOFT_DOMAIN
from dsbd_export.passes.weighted_layers import Linear, Store, replace_node, shape_of, weight_chunks

_ACCURACY_LEVEL = 4
_BLOCK_SIZES = {
    8: 64,
    4: 32,
}  # block size by number of bits; rows are rounded to int8 in the same blocks
_SMALL_BLOCK = 16
_ZERO_POINT = 128  # with 8 bits, which are symmetric
_MIDDLE = 8  # with symmetric 4 bits; MatMulNBits then needs no zero points


@dataclass(frozen=True)
class Blocks:
    """Scales of the blocks of a weight (out, in): value = (integer - zero_point) * scale."""

    size: int
    scales: NDArray[np.float32]  # (out, in / size rounded up) float32
    zero_points: NDArray[np.uint8]  # the same shape, uint8


class BlockwiseQuantizer:
    """Rewrites products and embeddings of a graph."""

    def __init__(self, graph: ir.Graph, *, is_exact: bool, is_symmetric: bool = False) -> None:
        self._graph = graph
        self._is_exact = is_exact
        self._is_symmetric = is_symmetric
        self._store = Store(graph)
        self._pairs: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def quantize_linear(self, linear: Linear, bits: int) -> None:
        """Replace a product by a MatMulNBits, and an Add if it has a bias."""
        by_output = linear.is_stored_by_output
        num_outputs, num_inputs = shape_of(linear.weight)[:: 1 if by_output else -1]
        tape = ir.tape.Tape()
        rows, num_rows = linear.rows, None
        if self._is_exact and bits == 4:
            rows, num_rows = self._never_alone(tape, linear.rows)
        inputs = [
            rows,
            self._integers(linear.weight, bits, by_output=by_output),
            self._scales(linear.weight, bits, by_output=by_output),
        ]
        if bits == 4 and not self._is_symmetric:
            inputs.append(self._zero_points(linear.weight, by_output=by_output))
        attributes = {
            "K": num_inputs,
            "N": num_outputs,
            "bits": bits,
            "block_size": self._block_size(linear.weight, bits, by_output=by_output),
            "accuracy_level": _ACCURACY_LEVEL,
        }
        result = tape.op("MatMulNBits", inputs, attributes, domain=MICROSOFT_DOMAIN)
        if num_rows is not None:
            first = self._integer("first", 0)
            result = tape.op("Slice", [result, first, num_rows, self._integer("row_axis", -2)])
        if linear.bias is not None:
            result = tape.op("Add", [result, linear.bias])
        replace_node(self._graph, linear.node, tape, result)

    def quantize_embedding(self, node: ir.Node) -> None:
        """Replace a Gather of tokens by a Gather of int8 blocks, which are then scaled."""
        weight, token_ids = node.inputs[0], node.inputs[1]
        assert weight is not None and weight.dtype is not None  # find_embeddings has checked
        to_float = {"to": weight.dtype}
        zero_point = self._store.constant(
            f"zero_point.{weight.dtype.name}", np.array(128, weight.dtype.numpy())
        )
        tape = ir.tape.Tape()
        blocks = tape.op("Gather", [self._integers(weight, 8), token_ids])  # (1, S, blocks, 64)
        blocks = tape.op("Sub", [tape.op("Cast", [blocks], to_float), zero_point])
        scales = tape.op("Gather", [self._scales(weight, 8), token_ids])  # (1, S, blocks)
        last_axis = self._integer("last_axis", -1)
        blocks = tape.op("Mul", [blocks, tape.op("Unsqueeze", [scales, last_axis])])
        hidden_size = shape_of(weight)[1]
        width = self._grid(weight, True, 8)[1] * block_size(8)
        flat = self._store.constant(f"flat_{width}", np.array([0, 0, width], np.int64))
        result = tape.op("Reshape", [blocks, flat])
        if hidden_size != width:
            first, end = self._integer("first", 0), self._integer("hidden_size", hidden_size)
            result = tape.op("Slice", [result, first, end, last_axis])
        replace_node(self._graph, node, tape, result)

    def _never_alone(self, tape: ir.tape.Tape, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return rows (..., n, in), with one more row of zeros if n is 1; and n, (1,) int64."""
        if rows not in self._pairs:
            none, two = self._integer("first", 0), self._integer("two", 2)
            num_rows = tape.op("Shape", [rows], {"start": -2, "end": -1})
            missing = tape.op("Max", [tape.op("Sub", [two, num_rows]), none])
            pads = tape.op("Concat", [none, missing], {"axis": 0})
            row_axis = self._integer("row_axis", -2)
            padded = tape.op("Pad", [rows, pads, None, row_axis], {"mode": "constant"})
            self._pairs[rows] = padded, num_rows
        return self._pairs[rows]

    def _integer(self, name: str, number: int) -> ir.Value:
        return self._store.constant(name, np.array([number], np.int64))

    def _integers(self, weight: ir.Value, bits: int, *, by_output: bool = True) -> ir.Value:
        def integers(values: NDArray[Any]) -> NDArray[Any]:
            values = values if by_output else values.T
            return block_integers(values, self._blocks_of(values, bits), bits)

        size = self._block_size(weight, bits, by_output=by_output)
        shape = (*self._grid(weight, by_output, bits), size * bits // 8)
        return self._store.derived(weight, f"int{bits}", integers, ir.DataType.UINT8, shape)

    def _scales(self, weight: ir.Value, bits: int, *, by_output: bool = True) -> ir.Value:
        assert weight.dtype is not None  # weights have a type
        dtype = weight.dtype

        def scales(values: NDArray[Any]) -> NDArray[Any]:
            blocks = self._blocks_of(values if by_output else values.T, bits)
            return blocks.scales.astype(dtype.numpy())

        shape = self._grid(weight, by_output, bits)
        return self._store.derived(weight, "scales", scales, dtype, shape)

    def _blocks_of(self, weight: NDArray[Any], bits: int) -> Blocks:
        return blocks_of(weight, bits, is_symmetric=self._is_symmetric)

    def _zero_points(self, weight: ir.Value, *, by_output: bool) -> ir.Value:
        def zero_points(values: NDArray[Any]) -> NDArray[Any]:
            blocks = self._blocks_of(values if by_output else values.T, 4)
            return pack_nibbles(blocks.zero_points)

        num_outputs, num_blocks = self._grid(weight, by_output, 4)
        shape = (num_outputs, -(-num_blocks // 2))
        return self._store.derived(weight, "zero_points", zero_points, ir.DataType.UINT8, shape)

    def _block_size(self, weight: ir.Value, bits: int, *, by_output: bool) -> int:
        num_inputs = shape_of(weight)[1 if by_output else 0]
        return block_size(bits, num_inputs, is_symmetric=self._is_symmetric)

    def _grid(self, weight: ir.Value, by_output: bool, bits: int) -> tuple[int, int]:
        """Return the number of outputs and the number of blocks of their inputs."""
        num_outputs, num_inputs = shape_of(weight)[:: 1 if by_output else -1]
        return num_outputs, -(-num_inputs // self._block_size(weight, bits, by_output=by_output))


def block_size(bits: int, num_inputs: int = 0, *, is_symmetric: bool = False) -> int:
    """Return how many inputs of an output share a scale."""
    is_small = bits == 4 and is_symmetric and num_inputs % (2 * _BLOCK_SIZES[4]) != 0
    return _SMALL_BLOCK if is_small else _BLOCK_SIZES[bits]


def blocks_of(weight: NDArray[Any], bits: int, *, is_symmetric: bool = False) -> Blocks:
    """Return scales and zero points of a weight (out, in).

    8 bits are symmetric around 128. 4 bits span the smallest value, the largest value and zero of a
    block. Symmetric 4 bits have the zero point 8; the lowest integer, -8, is the value of largest
    magnitude. For example a block from -1 to 4 has the scale -0.5.
    """
    size = block_size(bits, weight.shape[1], is_symmetric=is_symmetric)
    scales = np.empty((weight.shape[0], -(-weight.shape[1] // size)), np.float32)
    middle = _ZERO_POINT if bits == 8 else _MIDDLE
    zero_points = np.full(scales.shape, middle, np.uint8)
    for rows in weight_chunks(weight.shape):
        blocks = _blocked(weight[rows], size)
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        if bits == 8:
            span = np.maximum(high, -low) / 127
        elif is_symmetric:
            span = np.where(high > -low, high, low) / -_MIDDLE
        else:
            span = (high - low) / 15
        scales[rows] = span
        if bits == 4 and not is_symmetric:
            zero_points[rows] = np.rint(-low / _divisors(span))
    return Blocks(size, scales, zero_points)


def block_integers(weight: NDArray[Any], blocks: Blocks, bits: int) -> NDArray[np.uint8]:
    """Return the integers of a weight (out, in): (out, in / block size rounded up, bytes) uint8.

    Two integers of 4 bits share a byte; the first is in the lower half: 3 and 5 give 0x53.
    """
    integers = np.empty((*blocks.scales.shape, blocks.size * bits // 8), np.uint8)
    for rows in weight_chunks(weight.shape):
        divisors = _divisors(blocks.scales[rows, :, None])
        scaled = np.rint(_blocked(weight[rows], blocks.size) / divisors)
        piece = np.clip(scaled + blocks.zero_points[rows, :, None], 0, 2**bits - 1).astype(np.uint8)
        integers[rows] = pack_nibbles(piece) if bits == 4 else piece
    return integers


def _divisors(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales to divide by: 1 in place of 0, the scale of a block of zeros.

    0 is stored, because ONNX Runtime subtracts 128 times the sum of a row's block in fp32. With a
    scale of 1 the rounding error of that would be a thousand times that of other blocks.
    """
    return np.where(scales != 0, scales, np.float32(1))


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return (..., n) numbers below 16 as (..., n / 2 rounded up) bytes, the first number lower."""
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    return np.asarray(values[..., 0::2] | (values[..., 1::2] << 4), np.uint8)


def _blocked(rows: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Return rows (n, in) as (n, blocks, block size) float32, padded with zeros."""
    full = np.pad(rows.astype(np.float32), [(0, 0), (0, -rows.shape[1] % size)])
    return full.reshape(rows.shape[0], -1, size)
