"""Attention whose sums are the same, bit for bit, wherever the visible rows are in the cache.

The order in which ONNX Runtime sums the softmax and the product with the values depends on the
places and the number of other rows. Here every Attention node becomes

    scores = query @ key^T * scale + mask         fp32, query heads of one key head as rows
    weights = exp(scores - max(scores))           fp32, element by element
    attended = (weights @ value) / sum(weights)   by one of the ``Sums`` below

``DoubleSums`` sums in double and rounds to fp32 at the end. In about one of 1e8 cases another order
changes the last bit of a result. ``IntegerSums`` is exact: weights and values are integers so small
that every partial sum is an integer below 2^24, which fp32 represents exactly. Scores are products
over the head's width. onnxruntime computes them in the same order for any number of rows except
one, for which it uses another kernel. So such a product gets one more row, of zeros. Products of
fp32 experts get one too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import PassManager, common

from dsbd_export.errors import ExportError
from dsbd_export.passes.optimize import known_heads_and_width
from dsbd_export.passes.weighted_layers import Store, replace_node, shape_of, weight_of
from dsbd_runtime.parts.attention.cache_entries import KEY, VALUE, present_name

_EXACT_BITS = 24  # bits of integers that fp32 represents exactly
_WEIGHT_BITS = 14  # bits of a row's largest weight
_SHARE_BITS = 15  # bits of the sum of a row's shares
_BELOW = 1e-3  # subtracted from the exponent, so that rounding keeps the largest weight in its bits
_MAX_ROWS_IN_FP32 = 4096  # 2^12 rows of 2^12 each are 2^24
_HEADROOM = 2.0  # largest representable value relative to the largest observed one
_SMALLEST_CHANNEL = (
    0.05  # relative to the layer's largest value: a channel may have been small by chance
)
_HIDDEN = -1e30
_BY_PACKET = ("Cos", "Sin")  # Eigen uses other functions for numbers that do not fill a packet
_PACKET = 16  # numbers of the widest packet
_KEEPS_ROWS = ("Identity", "Cast", "Reshape", "Slice")  # Slice removes a sink
_CHANGES_LAYOUT = ("Identity", "Reshape", "Transpose", "Mul")


class Sums(Protocol):
    """Softmax and product with the values, whose sums do not depend on the order of rows."""

    def attended(
        self, tape: ir.tape.Tape, scores: ir.Value, value: ir.Value, *, has_sink: bool = False
    ) -> ir.Value:
        """Return softmax(scores) @ value.

        scores: (1, Hkv, M, C). Rows that are not visible have ``_HIDDEN``, or scores far below the
            others. With a sink (1, Hkv, M, C + 1); the last column has no value.
        value: (1, Hkv, C, D), an output of the graph. The result is (1, Hkv, M, D).
        """

    def prepare_value(self, tape: ir.tape.Tape, layer: int, new: ir.Value) -> ir.Value:
        """Return a layer's S new values, (1, Hkv, S, D), in the form that the cache stores."""


class DoubleSums:
    """Sums in double; the values are unchanged."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last_axis = store.constant("last_axis", np.array([-1], np.int64))

    def attended(
        self, tape: ir.tape.Tape, scores: ir.Value, value: ir.Value, *, has_sink: bool = False
    ) -> ir.Value:
        largest = tape.op("ReduceMax", [scores, self._last_axis], {"keepdims": 1})
        weights = tape.op("Exp", [tape.op("Sub", [scores, largest])])
        weights = tape.op("Cast", [weights], {"to": ir.DataType.DOUBLE})
        values = tape.op("Cast", [value], {"to": ir.DataType.DOUBLE})
        total = tape.op("ReduceSum", [weights, self._last_axis], {"keepdims": 1})
        weights = _without_sink(tape, self._store, weights) if has_sink else weights
        attended = tape.op("Div", [tape.op("MatMul", [weights, values]), total])
        return tape.op("Cast", [attended], {"to": ir.DataType.FLOAT})

    def prepare_value(self, tape: ir.tape.Tape, layer: int, new: ir.Value) -> ir.Value:
        return new


class IntegerSums:
    """Sums of integers that fp32 represents exactly, so any order gives the same bits.

    weights = round(2^b * exp(scores - max))       b = 14, or less, so that C weights fit 24 bits
    shares  = round(2^15 * weights / sum(weights))
    attended = (shares @ value) / sum(shares) * scale

    The cache stores value = round(v / scale), at most ``limit``. Each channel has a scale, twice
    the one that the largest value of the calibration needs. With a context of 4,096 rows the sum of
    a row's shares is at most 2^15 + 2^11, so ``limit`` = 2^24 / (2^15 + 2^11) = 481.
    """

    def __init__(
        self, store: Store, context_length: int, largest_values: Mapping[int, NDArray[np.float32]]
    ) -> None:
        """Take the maximum columns of scores, and each layer's largest values, (Hkv, D)."""
        self._store = store
        self._is_long = context_length > _MAX_ROWS_IN_FP32
        bits = _EXACT_BITS - math.ceil(math.log2(context_length))
        self._weight_bits = _WEIGHT_BITS if self._is_long else min(_WEIGHT_BITS, bits)
        largest_sum = min(2**_SHARE_BITS + context_length / 2, 2 ** (_SHARE_BITS + 1))
        self._limit = math.floor(2**_EXACT_BITS / largest_sum)
        self._scales = {layer: self._scale(values) for layer, values in largest_values.items()}
        self._layer_by_present = {present_name(layer, VALUE): layer for layer in largest_values}
        self._last_axis = store.constant("last_axis", np.array([-1], np.int64))

    def attended(
        self, tape: ir.tape.Tape, scores: ir.Value, value: ir.Value, *, has_sink: bool = False
    ) -> ir.Value:
        layer = self._layer_by_present[str(value.name)]
        largest = tape.op("ReduceMax", [scores, self._last_axis], {"keepdims": 1})
        exponent = self._number("exponent", self._weight_bits * math.log(2) - _BELOW)
        shifted = tape.op("Sub", [scores, tape.op("Sub", [largest, exponent])])
        weights = tape.op("Round", [tape.op("Exp", [shifted])])
        whole = self._number("whole", 2.0**_SHARE_BITS)
        per_weight = tape.op("Div", [whole, self._sum(tape, weights, is_long=self._is_long)])
        shares = tape.op("Round", [tape.op("Mul", [weights, per_weight])])
        total = self._sum(tape, shares, is_long=False)
        shares = _without_sink(tape, self._store, shares) if has_sink else shares
        attended = tape.op("Div", [tape.op("MatMul", [shares, value]), total])
        scale = self._store.constant(f"value_scale.{layer}", self._scales[layer])
        return tape.op("Mul", [attended, scale])

    def prepare_value(self, tape: ir.tape.Tape, layer: int, new: ir.Value) -> ir.Value:
        per_scale = self._store.constant(f"per_value_scale.{layer}", 1 / self._scales[layer])
        integers = tape.op("Round", [tape.op("Mul", [new, per_scale])])
        limits = [self._number("lowest", -self._limit), self._number("highest", self._limit)]
        return tape.op("Clip", [integers, *limits])

    def _sum(self, tape: ir.tape.Tape, integers: ir.Value, *, is_long: bool) -> ir.Value:
        if not is_long:
            return tape.op("ReduceSum", [integers, self._last_axis], {"keepdims": 1})
        wide = tape.op("Cast", [integers], {"to": ir.DataType.DOUBLE})
        total = tape.op("ReduceSum", [wide, self._last_axis], {"keepdims": 1})
        return tape.op("Cast", [total], {"to": ir.DataType.FLOAT})

    def _scale(self, largest_values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scales, one number per channel, (1, Hkv, 1, D)."""
        smallest = max(_SMALLEST_CHANNEL * float(largest_values.max()), 1e-30)
        scale = np.maximum(largest_values, np.float32(smallest)) * np.float32(
            _HEADROOM / self._limit
        )
        return np.asarray(scale[None, :, None, :], np.float32)

    def _number(self, name: str, value: float) -> ir.Value:
        return self._store.constant(name, np.array(value, np.float32))


def _without_sink(tape: ir.tape.Tape, store: Store, columns: ir.Value) -> ir.Value:
    bounds = [_integers(store, 0), _integers(store, -1), _integers(store, -1)]
    return tape.op("Slice", [columns, *bounds])


def without_exact_form(model: ir.Model, layers: Sequence[int]) -> str | None:
    """Return why a graph has no exact form of attention, None if it has one."""
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    if not all(_is_scattered(node.inputs[2]) for node in nodes):
        return (
            "its values are computed from what is cached (latent attention), which depends on "
            "where a row lies"
        )
    num_attentions = len(nodes) + len(_softmaxes(model.graph))
    if num_attentions != len(layers):
        return (
            f"{num_attentions} attentions read the values of {len(layers)} layers, expected one "
            "a layer"
        )
    unknown = (n for n in model.graph if n.op_type in _BY_PACKET and _last_size(n) is None)
    if (node := next(unknown, None)) is not None:
        return f"how many rotary angles the {node.op_type} node {node.name} gets is not known"
    return None


def _is_scattered(value: ir.Value | None) -> bool:
    """Return whether a value is the content of a cache after a call."""
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "TensorScatter"


def attend_exactly(
    model: ir.Model,
    context_length: int,
    layers: Sequence[int],
    largest_values: Mapping[int, NDArray[np.float32]] | None,
) -> int:
    """Rewrite all attention in place, or raise ExportError; return the number of attentions.

    largest_values: the largest values of each layer, (Hkv, D), for sums of integers; None: sums in
        double.
    """
    if reason := without_exact_form(model, layers):
        raise ExportError(f"attention='exact' has no form here: {reason}; use attention='fused'")
    graph = model.graph
    store = Store(graph, "exact")
    num_columns = context_length + any(_drops_sink(steps) for *_, steps in _softmaxes(graph))
    sums: Sums = (
        DoubleSums(store)
        if largest_values is None
        else IntegerSums(store, num_columns, largest_values)
    )
    nodes = [node for node in graph if node.op_type == "Attention"]
    score_products = [_replace_attention(graph, node, sums, store) for node in nodes]
    num_attentions = len(nodes) + _replace_softmaxes(graph, sums)
    _prepare_values(graph, sums, layers)
    keys = {present_name(layer, KEY) for layer in layers}
    for node in list(graph):
        if node.op_type == "MatMul" and node not in score_products:
            if _may_have_one_row(node, keys):
                _add_row(graph, node, store)
    for node in list(graph):
        if node.op_type in _BY_PACKET:
            _fill_packets(graph, node, store)
    PassManager([common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass()])(
        model
    )
    return num_attentions


def _replace_attention(graph: ir.Graph, node: ir.Node, sums: Sums, store: Store) -> ir.Node | None:
    """Replace an Attention node; return the product of its scores if it always has several rows."""
    query, key, value, mask = node.inputs[:4]
    assert query is not None and key is not None and value is not None
    num_heads, width = known_heads_and_width(query)
    num_key_heads, value_width = known_heads_and_width(value)
    tape = ir.tape.Tape()
    scale = node.attributes.get_float("scale", 1.0)
    scaling = store.constant(f"scale.{scale!r}", np.array(scale, np.float32))
    group = _integers(store, 1, num_key_heads, -1, width)
    rows = tape.op("Reshape", [tape.op("Mul", [query, scaling]), group])
    turned = tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})
    product = tape.op("MatMul", [rows, turned])
    seen = store.constant("seen", np.array(0, np.float32))
    hidden = store.constant("hidden", np.array(_HIDDEN, np.float32))
    added = tape.op("Where", [mask, seen, hidden])
    if num_heads > num_key_heads:
        repeats = _integers(store, 1, 1, num_heads // num_key_heads, 1)
        added = tape.op("Tile", [added, repeats])
    attended = sums.attended(tape, tape.op("Add", [product, added]), value)
    ungroup = _integers(store, 1, num_heads, -1, value_width)
    replace_node(graph, node, tape, tape.op("Reshape", [attended, ungroup]))
    return product.producer() if num_heads > num_key_heads else None


def _integers(store: Store, *numbers: int) -> ir.Value:
    return store.constant("_".join(map(str, numbers)), np.array(numbers, np.int64))


def _replace_softmaxes(graph: ir.Graph, sums: Sums) -> int:
    """Replace softcapped attention and a model's own attention; return the number of replaced."""
    softmaxes = _softmaxes(graph)
    for node, softmax, steps in softmaxes:
        scores, value = softmax.inputs[0], node.inputs[1]
        assert scores is not None and value is not None
        tape = ir.tape.Tape()
        for step in steps:
            if step.op_type == "Reshape":  # it keeps the last axis
                scores = tape.op("Reshape", [scores, step.inputs[1]])
        attended = sums.attended(tape, scores, value, has_sink=_drops_sink(steps))
        replace_node(graph, node, tape, attended)
    return len(softmaxes)


def _softmaxes(graph: ir.Graph) -> list[tuple[ir.Node, ir.Node, list[ir.Node]]]:
    """Return each product with cached values, the Softmax before it, and the nodes in between."""
    attentions = []
    for node in graph:
        if node.op_type != "MatMul" or not _is_scattered(node.inputs[1]):
            continue
        steps: list[
            ir.Node
        ] = []  # nodes that keep the last axis, except that one may remove a sink
        value = node.inputs[0]
        while value is not None and (maker := value.producer()) is not None:
            if maker.op_type == "Softmax":
                attentions.append((node, maker, steps))
            if maker.op_type not in _KEEPS_ROWS:
                break
            steps.insert(0, maker)
            value = maker.inputs[0]
    return attentions


def _drops_sink(steps: list[ir.Node]) -> bool:
    """Return whether the last column of a Softmax, a sink's, is removed afterwards."""
    return any(step.op_type == "Slice" for step in steps)


def _prepare_values(graph: ir.Graph, sums: Sums, layers: Sequence[int]) -> None:
    """Make the cache store the values in the form that the sums need."""
    outputs = {output.name: output for output in graph.outputs}
    for layer in layers:
        scatter = outputs[present_name(layer, VALUE)].producer()
        assert scatter is not None and scatter.inputs[1] is not None  # check_contract has checked
        tape = ir.tape.Tape()
        prepared = sums.prepare_value(tape, layer, scatter.inputs[1])
        graph.insert_before(scatter, tape.nodes)
        scatter.replace_input_with(1, prepared)


def _may_have_one_row(node: ir.Node, keys: set[str]) -> bool:
    """Return whether a product uses another kernel for one row: one with cached keys or experts."""
    if weight := weight_of(node):
        return len(shape_of(weight[0])) == 3
    value = node.inputs[1]
    producer = None if value is None else value.producer()
    while producer is not None and producer.op_type in _CHANGES_LAYOUT and producer.inputs[0]:
        producer = producer.inputs[0].producer()
    return producer is not None and str(producer.outputs[0].name) in keys


def _add_row(graph: ir.Graph, node: ir.Node, store: Store) -> None:
    """Give the product one more row, of zeros, and remove it from the result."""
    rows, other = node.inputs[0], node.inputs[1]
    assert rows is not None and other is not None

    tape = ir.tape.Tape()
    row_axis, one_more = _integers(store, -2), _integers(store, 0, 1)
    padded = tape.op("Pad", [rows, one_more, None, row_axis], {"mode": "constant"})
    product = tape.op("MatMul", [padded, other])
    first, last = _integers(store, 0), _integers(store, -1)
    replace_node(graph, node, tape, tape.op("Slice", [product, first, last, row_axis]))


def _last_size(node: ir.Node) -> int | None:
    """Return how many numbers a row of a node's first input has, None if that is unknown."""
    rows = node.inputs[0]
    width = None if rows is None or rows.shape is None else rows.shape[-1]
    return width if isinstance(width, int) else None


def _fill_packets(graph: ir.Graph, node: ir.Node, store: Store) -> None:
    """Pad the rows of a function to whole packets, so that no number is computed in a remainder."""
    angles, width = node.inputs[0], _last_size(node)
    assert angles is not None and width is not None  # ``without_exact_form`` has checked
    if width % _PACKET == 0:
        return
    last_axis, missing = _integers(store, -1), _integers(store, 0, -width % _PACKET)
    tape = ir.tape.Tape()
    filled = tape.op("Pad", [angles, missing, None, last_axis], {"mode": "constant"})
    result = tape.op(node.op_type, [filled])
    first, end = _integers(store, 0), _integers(store, width)
    replace_node(graph, node, tape, tape.op("Slice", [result, first, end, last_axis]))
