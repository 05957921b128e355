"""Products with a weight, and lookups of a weight's rows by token: found and replaced here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_runtime.parts.attention.attention_rows import INPUT_IDS
from dsbd_runtime.parts.feature.feature_memory import TARGET_FEATURES

_CHUNK_ELEMENTS = 4 * 2**20
MIN_IN_FEATURES = (
    32  # one block; a smaller product is not a layer, such as the product of rotary frequencies
)
_KEEPS_VALUES = ("Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity")
_KEEPS_ROWS = ("Cast", "Identity", "RMSNormalization", "Split", "Slice", "Concat")
_ROUTES = ("Softmax", "TopK")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A product of rows with a weight, plus a bias."""

    node: ir.Node
    weight: ir.Value  # the initializer, (in, out), or (E, in, out) for E experts
    is_stored_by_output: bool  # the initializer is (out, in) or (E, out, in) instead
    bias: ir.Value | None  # (out,); None: no bias
    is_head: bool  # it is the last product of the graph, which computes the logits
    may_lack_rows: bool  # it may have no rows, like the head
    is_router: bool  # its result chooses experts

    @property
    def rows(self) -> ir.Value:
        """Return the rows that are multiplied with the weight, (..., in)."""
        rows = self.node.inputs[0]
        assert rows is not None  # a product has two operands
        return rows

    @property
    def num_experts(self) -> int:
        """Return E, 0 for a plain matrix."""
        return shape_of(self.weight)[0] if len(shape_of(self.weight)) == 3 else 0


def find_linears(graph: ir.Graph) -> list[Linear]:
    """Return the products whose weight has at least ``MIN_IN_FEATURES`` inputs, in their order."""
    products = [
        (node, weight)
        for node in graph
        if (weight := weight_of(node)) is not None
        and shape_of(weight[0])[-1 if weight[1] else -2] >= MIN_IN_FEATURES
    ]
    return [
        Linear(
            node=node,
            weight=value,
            is_stored_by_output=is_stored_by_output,
            bias=node.inputs[2] if len(node.inputs) > 2 else None,
            is_head=node is products[-1][0],
            may_lack_rows=node is products[-1][0] or _reads(node, TARGET_FEATURES),
            is_router=node is not products[-1][0] and _routes(node),
        )
        for node, (value, is_stored_by_output) in products
    ]


def find_embeddings(graph: ir.Graph) -> list[ir.Node]:
    """Return the Gather nodes that look up tokens: rows of a weight (V, H) by ``input_ids``."""
    return [
        node
        for node in graph
        if node.op_type == "Gather"
        and _is_weight(node.inputs[0])
        and _is_token_ids(node.inputs[1])
        and len(shape_of(node.inputs[0])) == 2
    ]


def shape_of(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of an initializer."""
    assert value is not None and value.const_value is not None  # callers pass weights only
    return tuple(value.const_value.shape.numpy())


def weight_of(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """Return the weight of a product and whether it is stored by output, None for other nodes."""
    weight = node.inputs[1] if node.op_type in ("Gemm", "MatMul") else None
    is_by_output = False
    if node.op_type == "Gemm":
        attributes = node.attributes
        factors = [attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        if factors != [1.0, 1.0] or attributes.get_int("transA", 0) != 0:
            return None
        is_by_output = attributes.get_int("transB", 0) == 1
    elif weight is not None and not _is_weight(weight):
        transpose = weight.producer()
        if transpose is None or transpose.op_type != "Transpose":
            return None
        weight, is_by_output = transpose.inputs[0], True
        num_axes = len(shape_of(weight)) if _is_weight(weight) else 2
        swapped = [*range(num_axes - 2), num_axes - 1, num_axes - 2]
        if list(transpose.attributes.get_ints("perm", ())) != swapped:
            return None
    if weight is None or not _is_weight(weight) or len(shape_of(weight)) not in (2, 3):
        return None
    return weight, is_by_output


def _is_token_ids(value: ir.Value | None) -> bool:
    """Return whether a value is ``input_ids``, reshaped or cast or not."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type in _KEEPS_VALUES:
        return _is_token_ids(producer.inputs[0])
    return value is not None and value.name == INPUT_IDS


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.const_value is not None


def _reads(node: ir.Node, name: str) -> bool:
    """Return whether a product's rows are the graph's input ``name``, or norms or parts of it."""
    value = node.inputs[0]
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in _KEEPS_ROWS:
            return False
        value = producer.inputs[0]
    return value is not None and value.name == name


def _routes(node: ir.Node) -> bool:
    """Return whether a Softmax or TopK reads the result of ``node``, as for a router."""
    return any(
        user.op_type in _ROUTES or (user.op_type in _KEEPS_VALUES and _routes(user))
        for user in (usage.node for usage in node.outputs[0].uses())
    )


class Store:
    """The initializers that are added to a graph, each name once."""

    def __init__(self, graph: ir.Graph, prefix: str = "quantize") -> None:
        self._graph = graph
        self._prefix = prefix

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Return a small initializer; the same name returns the same one."""
        name = f"{self._prefix}.{name}"
        return self._graph.initializers.get(name) or self._added(name, ir.tensor(array))

    def derived(
        self,
        weight: ir.Value,
        suffix: str,
        compute: Callable[[NDArray[Any]], NDArray[Any]],
        dtype: ir.DataType,
        shape: tuple[int, ...],
    ) -> ir.Value:
        """Return the initializer ``compute(weight)``; it is computed when written, and not kept."""
        name = f"{weight.name}.{suffix}"
        tensor = weight.const_value
        assert tensor is not None  # a weight is an initializer
        lazy = ir.LazyTensor(lambda: ir.tensor(compute(tensor.numpy())), dtype, ir.Shape(shape))
        return self._graph.initializers.get(name) or self._added(name, lazy)

    def joined(self, weights: Sequence[ir.Value], axis: int) -> ir.Value:
        """Return the initializer of several concatenated weights, computed when it is written."""
        tensors = [weight.const_value for weight in weights if weight.const_value is not None]
        dtype, shape = tensors[0].dtype, list(shape_of(weights[0]))
        shape[axis] = sum(shape_of(weight)[axis] for weight in weights)

        def together() -> ir.TensorProtocol:
            arrays = [tensor.numpy() for tensor in tensors]
            return ir.tensor(np.concatenate(arrays, axis), dtype=dtype)

        lazy = ir.LazyTensor(together, dtype, ir.Shape(shape))
        return self._added(f"{self._prefix}.{weights[0].name}", lazy)

    def _added(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = name
        value = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value


def replace_node(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape, result: ir.Value) -> None:
    """Replace ``node`` by the nodes of ``tape``; ``result`` replaces its output."""
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [result])


def weight_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of the first axis with about ``_CHUNK_ELEMENTS`` each, to process one by one."""
    num_rows = max(1, _CHUNK_ELEMENTS * shape[0] // max(1, int(np.prod(shape))))
    return (slice(start, start + num_rows) for start in range(0, shape[0], num_rows))
