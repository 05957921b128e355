"""Add tensors to a graph that are computed from a weight only while the graph is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray


class Store:
    """The initializers that are added to one graph, each name once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Return a small initializer, shared by all who ask for the name."""
        name = f"quantize.{name}"
        return self._known(name) or self._added(name, ir.tensor(array))

    def derived(
        self,
        weight: ir.Value,
        suffix: str,
        compute: Callable[[NDArray[Any]], NDArray[Any]],
        dtype: ir.DataType,
        shape: tuple[int, ...],
    ) -> ir.Value:
        """Return the initializer ``compute(weight)``, of this type and shape.

        It is computed when it is written and not kept: at any time one weight and what is made
        of it are in memory.
        """
        name = f"{weight.name}.{suffix}"
        tensor = weight.const_value
        assert tensor is not None  # a weight is an initializer
        lazy = ir.LazyTensor(lambda: ir.tensor(compute(tensor.numpy())), dtype, ir.Shape(shape))
        return self._known(name) or self._added(name, lazy)

    def _known(self, name: str) -> ir.Value | None:
        return self._graph.initializers.get(name)

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
    """Put the nodes of ``tape`` in the place of ``node``, whose output ``result`` becomes."""
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [result])
