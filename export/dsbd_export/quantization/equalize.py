"""Products of a graph converted to the forms of ``row_forms``; in fp32 its results are the same.

Dividing the rows of products by scales s costs nothing at run time, because other weights are
divided instead:

    rows = norm(x) * g                     g / s, if only products read the rows
    rows = act(gate) * up                  the columns of up's weight / s
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.passes.weighted_layers import Linear, Store, replace_node, shape_of, weight_chunks
from dsbd_export.quantization.row_forms import (
    AS_IT_IS,
    FormChoice,
    RowForm,
    RowsOfProducts,
    key_of,
    rotation,
)

_NORMS = ("RMSNormalization", "LayerNormalization")
_JOINS_HEADS = ("Reshape", "Transpose")
# Gather: the head reads some rows of the norm.
_KEEPS_CHANNELS = ("Identity", "Reshape", "Squeeze", "Gather")
_LAST_AXIS = -1

Divide = Callable[[NDArray[np.float32]], None]
"""Divides rows by scales, (in,), by changing the weights that compute them."""


@dataclass(frozen=True)
class EqualizedProducts:
    """Counts of groups of products (a group reads the same rows): scaled, rotated."""

    num_scaled: int = 0
    num_rotated: int = 0

    def __str__(self) -> str:
        return f"rows of {self.num_scaled} groups scaled by channel, of {self.num_rotated} rotated"


NOTHING_EQUALIZED = EqualizedProducts()


class Equalizer:
    """Chooses forms of products by statistics of their rows, and rewrites a graph."""

    def __init__(
        self,
        graph: ir.Graph,
        linears: Sequence[Linear],
        embeddings: Sequence[ir.Node],
        seen: RowsOfProducts,
        choice: FormChoice,
    ) -> None:
        self._graph = graph
        self._store = Store(graph, "equalize")
        self._linears = {linear.node: linear for linear in linears}
        self._seen = seen
        self._choice = choice
        self._num_rewritten = 0
        self.embeddings = list(embeddings)
        self.done = NOTHING_EQUALIZED

    def equalize(self) -> list[Linear]:
        """Rewrite the graph; return its products, in their order."""
        groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
        for node, linear in self._linears.items():
            groups[linear.rows].append(node)
        for rows, nodes in groups.items():
            group = [self._linears[node] for node in nodes]
            if any(each.num_experts or not self._is_own(each) for each in group):
                continue
            form = self._chosen(rows, group)
            if form.scales is not None or form.block:
                self._apply(rows, group, form)
        return list(self._linears.values())

    def _is_own(self, linear: Linear) -> bool:
        """Return whether a weight is read by one product only, and at most one lookup of tokens."""
        reader, _ = _reader(linear)
        lookups = self._lookups(linear.weight)
        if len(lookups) > 1 or not _is_read_by(linear.weight, {reader, *lookups}):
            return False
        return reader is linear.node or _is_read_by(reader.outputs[0], {linear.node})

    def _chosen(self, rows: ir.Value, group: Sequence[Linear]) -> RowForm:
        weights: list[NDArray[Any]] = []  # (out, in) each
        for linear in group:
            tensor = linear.weight.const_value
            assert tensor is not None  # a weight is an initializer
            weights.append(tensor.numpy() if linear.is_stored_by_output else tensor.numpy().T)
        seen = next((self._seen[key] for key in map(key_of, weights) if key in self._seen), None)
        if seen is None:
            return AS_IT_IS
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        can_scale = self._divides(rows, {linear.node for linear in group}) is not None
        can_rotate = _row_shape(rows, 1) is not None
        maker = _maker(rows)
        return self._choice.form(
            seen,
            weight,
            can_scale=can_scale,
            can_rotate=can_rotate,
            is_after_attention=maker is not None and maker.op_type in _JOINS_HEADS,
            is_head=any(linear.is_head for linear in group),
            is_looked_up=any(self._lookups(linear.weight) for linear in group),
        )

    def _apply(self, rows: ir.Value, group: Sequence[Linear], form: RowForm) -> None:
        nodes = {linear.node for linear in group}
        if form.scales is not None and (divide := self._divides(rows, nodes)) is not None:
            divide(form.scales)
        if form.block:
            first, tape = group[0], ir.tape.Tape()
            num_inputs = shape_of(first.weight)[1 if first.is_stored_by_output else 0]
            rows = self._rotation(tape, rows, form.block, num_inputs)
            self._graph.insert_before(first.node, tape.nodes)
            for node in nodes:
                node.replace_input_with(0, rows)
        self.done = EqualizedProducts(
            self.done.num_scaled + (form.scales is not None),
            self.done.num_rotated + bool(form.block),
        )
        for linear in group:
            by_output = linear.is_stored_by_output
            weight = self._rewritten(linear.weight, partial(_formed, form, by_output=by_output))
            for lookup in self._lookups(linear.weight):
                self._turn_back(lookup, weight, form)
            self._put_weight(linear, weight)

    def _rotation(
        self, tape: ir.tape.Tape, rows: ir.Value, block: int, num_channels: int
    ) -> ir.Value:
        shapes = (_row_shape(rows, size) for size in (block, num_channels))
        blocks, whole = (
            self._store.constant(f"shape_{'_'.join(map(str, shape))}", np.array(shape, np.int64))
            for shape in shapes
            if shape is not None
        )
        matrix = self._store.constant(f"rotation_{block}", rotation(block))
        turned = tape.op("MatMul", [tape.op("Reshape", [rows, blocks]), matrix])
        rotated = tape.op("Reshape", [turned, whole])
        rotated.shape, rotated.type = rows.shape, rows.type
        return rotated

    def _turn_back(self, lookup: ir.Node, weight: ir.Value, form: RowForm) -> None:
        """Make a lookup of tokens in a weight of this form return the original rows."""
        tape = ir.tape.Tape()
        rows = tape.op("Gather", [weight, lookup.inputs[1]], {"axis": 0})
        rows.shape, rows.type = lookup.outputs[0].shape, lookup.outputs[0].type
        self.embeddings[self.embeddings.index(lookup)] = tape.nodes[0]
        if form.block:
            rows = self._rotation(tape, rows, form.block, shape_of(weight)[1])
        if form.scales is not None:
            inverse = self._store.constant(f"of_{weight.name}", 1 / form.scales)
            rows = tape.op("Mul", [rows, inverse])
        replace_node(self._graph, lookup, tape, rows)

    def _lookups(self, weight: ir.Value) -> list[ir.Node]:
        return [node for node in self.embeddings if node.inputs[0] is weight]

    def _divides(self, rows: ir.Value, readers: set[ir.Node]) -> Divide | None:
        """Return a function that divides rows which only ``readers`` read, None if impossible."""
        if not _is_read_by(rows, readers):
            return None
        maker = rows.producer()
        if maker is None:
            return None
        if _keeps_channels(maker) and maker.inputs[0] is not None:
            return self._divides(maker.inputs[0], {maker})
        vectors = [i for i in range(1, len(maker.inputs)) if _is_vector(maker.inputs[i])]
        if maker.op_type in _NORMS:
            return self._divides_inputs(maker, vectors) if 1 in vectors else None
        if maker.op_type != "Mul":
            return None
        vectors = [i for i in (0, 1) if _is_vector(maker.inputs[i])]
        if vectors:
            return self._divides_inputs(maker, vectors)
        factors = (self._divides_product(value, maker) for value in reversed(maker.inputs) if value)
        return next((divide for divide in factors if divide is not None), None)

    def _divides_inputs(self, maker: ir.Node, indices: Sequence[int]) -> Divide:
        """Return a function that divides the vectors that a norm or product per channel reads."""

        def divide(scales: NDArray[np.float32]) -> None:
            for index in indices:
                vector = maker.inputs[index]
                assert vector is not None  # the caller has checked
                new = self._rewritten(vector, lambda values: values / scales)
                maker.replace_input_with(index, new)

        return divide

    def _divides_product(self, value: ir.Value, reader: ir.Node) -> Divide | None:
        """Return a function that divides the columns of a product, or of a part after a Split."""
        maker = value.producer()
        if maker is None or not _is_read_by(value, {reader}):
            return None
        first = 0
        if maker.op_type == "Split":
            product, sizes = maker.inputs[0], maker.inputs[1] if len(maker.inputs) > 1 else None
            if product is None or sizes is None or sizes.const_value is None:
                return None
            if maker.attributes.get_int("axis", 0) != _LAST_AXIS:
                return None
            first = int(sizes.const_value.numpy()[: value.index() or 0].sum())
            if not _is_read_by(product, {maker}):
                return None
            maker = product.producer()
        linear = None if maker is None else self._linears.get(maker)
        if linear is None or (linear.bias and not linear.bias.is_initializer()):
            return None
        if linear.num_experts or self._lookups(linear.weight) or not self._is_own(linear):
            return None
        return lambda scales: self._divide_columns(linear.node, first, scales)

    def _divide_columns(self, node: ir.Node, first: int, scales: NDArray[np.float32]) -> None:
        linear = self._linears[node]
        columns = slice(first, first + len(scales))

        def divided(values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
            factors = np.ones(values.shape[axis], np.float32)
            factors[columns] /= scales
            return np.asarray(values * (factors[:, None] if axis < values.ndim - 1 else factors))

        axis = 0 if linear.is_stored_by_output else 1
        weight = self._rewritten(linear.weight, partial(divided, axis=axis))
        if linear.bias is not None:
            bias = self._rewritten(linear.bias, divided)
            node.replace_input_with(2, bias)
            linear = dataclasses.replace(linear, bias=bias)
        self._put_weight(linear, weight)

    def _put_weight(self, linear: Linear, weight: ir.Value) -> None:
        reader, index = _reader(linear)
        reader.replace_input_with(index, weight)
        self._linears[linear.node] = dataclasses.replace(linear, weight=weight)

    def _rewritten(
        self, value: ir.Value, compute: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> ir.Value:
        """Return the initializer ``compute(value)``, computed when it is written."""
        assert value.dtype is not None  # initializers have a type
        self._num_rewritten += 1  # layers may share an initializer, but not its new values
        name = f"even_{self._num_rewritten}"
        return self._store.derived(value, name, compute, value.dtype, shape_of(value))


def _reader(linear: Linear) -> tuple[ir.Node, int]:
    """Return the node that reads a product's weight (its Transpose or itself), and the input."""
    weight = linear.node.inputs[1]
    transpose = None if weight is linear.weight or weight is None else weight.producer()
    return (linear.node, 1) if transpose is None else (transpose, 0)


def _formed(form: RowForm, weight: NDArray[np.float32], *, by_output: bool) -> NDArray[np.float32]:
    """Return a weight, (out, in) or (in, out), for rows in a form."""
    weight = weight if by_output else weight.T
    formed = np.empty(weight.shape, np.float32)
    for outputs in weight_chunks(weight.shape):
        formed[outputs] = form.of_weight(weight[outputs])
    return formed if by_output else np.ascontiguousarray(formed.T)


def _row_shape(rows: ir.Value, num_channels: int) -> tuple[int, ...] | None:
    """Return the shape of rows cut to pieces, None unless rows are (n, in) or (1, n, in)."""
    shape = _known_shape(rows)
    if shape is None or len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1):
        return None
    return (*([1] if len(shape) == 3 else []), -1, num_channels)


def _is_read_by(value: ir.Value, readers: set[ir.Node]) -> bool:
    users: Iterator[ir.Node] = (usage.node for usage in value.uses())
    return not value.is_graph_output() and all(user in readers for user in users)


def _is_vector(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer (n,) with more than one number."""
    is_known = value is not None and value.is_initializer() and value.const_value is not None
    return is_known and len(shape_of(value)) == 1 and shape_of(value)[0] > 1


def _maker(rows: ir.Value) -> ir.Node | None:
    """Return the node that computed rows, before rows were selected or reshaped."""
    maker = rows.producer()
    while maker is not None and _keeps_channels(maker) and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker


def _keeps_channels(node: ir.Node) -> bool:
    """Return whether a node returns whole rows of its first input."""
    if node.op_type not in _KEEPS_CHANNELS or node.inputs[0] is None:
        return False
    before, after = _known_shape(node.inputs[0]), _known_shape(node.outputs[0])
    if not before or not after:
        return False
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) % len(before) < len(before) - 1
    return before[-1] == after[-1]


def _known_shape(value: ir.Value) -> list[int | ir.SymbolicDim] | None:
    """Return the shape of a value; for squeezed rows of a head it is computed."""
    if value.shape is not None:
        return list(value.shape)
    maker = value.producer()
    if maker is None or maker.op_type != "Squeeze" or maker.inputs[0] is None:
        return None
    axes = None if len(maker.inputs) < 2 else maker.inputs[1]
    before = _known_shape(maker.inputs[0])
    if before is None or axes is None or axes.const_value is None:
        return None
    squeezed = {axis % len(before) for axis in axes.const_value.numpy().tolist()}
    return [size for axis, size in enumerate(before) if axis not in squeezed]
