"""Quantization of the weights of a captured graph, one after the other while it is saved.

| | int8-dynamic | int8 | int4 |
|---|---|---|---|
| products with a matrix | W8A8 | blocks of 8 bits | blocks of 4 bits |
| the head | W8A8 | blocks of 8 bits | blocks of 8 bits |
| embedding of tokens | int8 by row | blocks of 8 bits | blocks of 8 bits |
| experts (batched products) | W8A8 | as they are | as they are |
| routers to experts, other embeddings, norms, biases, attention, caches | as they are | | |

A head that shares the embedding's weight shares its integers: they are stored once.
"""

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import PassManager, common

from dsbd_export.config import MICROSOFT_DOMAIN
from dsbd_export.passes.weighted_layers import Linear, find_embeddings, find_linears
from dsbd_export.quantization.equalize import NOTHING_EQUALIZED, EqualizedProducts, Equalizer
from dsbd_export.quantization.product_rows import RowsOfProducts
from dsbd_export.quantization.quantize_blockwise import BlockwiseQuantizer, block_size
from dsbd_export.quantization.quantize_dynamic import DynamicQuantizer
from dsbd_export.quantization.row_forms import FormChoice
from dsbd_runtime.bundle_files.manifest import INT4_SYMMETRIC

_BITS = {"int8": 8, "int4": 4, INT4_SYMMETRIC: 4}
_HEAD_BITS = 8
# By what rounds rows to int8; in int4 the weights lose more than any form could save.
_CHOICES = {
    "int8-dynamic": FormChoice(),
    "int8": FormChoice(shared=block_size(8)),
}
_MICROSOFT_OPSET = 1


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Numbers of products and embeddings that were quantized, and of products that were not."""

    num_linears: int
    num_embeddings: int
    num_routers: int
    num_expert_products: int
    equalized: EqualizedProducts = NOTHING_EQUALIZED

    def __str__(self) -> str:
        done = f"{self.num_linears} products and {self.num_embeddings} embeddings quantized"
        kept = [
            f"{count} {name}"
            for count, name in (
                (self.num_routers, "routers"),
                (self.num_expert_products, "expert products"),
            )
            if count
        ]
        if kept:
            done += f", {' and '.join(kept)} left as they are"
        return done if self.equalized == NOTHING_EQUALIZED else f"{done}; {self.equalized}"


def quantize_graph(
    model: ir.Model, kind: str, *, is_exact: bool, rows: RowsOfProducts | None = None
) -> Quantized:
    """Quantize ``model`` in place; ``kind`` is one of ``QUANTIZED_FORMS``."""
    linears = find_linears(model.graph)
    routers = [linear for linear in linears if linear.is_router]
    others = [linear for linear in linears if not linear.is_router]
    embeddings = find_embeddings(model.graph)
    num_left, equalized = 0, NOTHING_EQUALIZED
    weights = _weights(others, embeddings)
    if (choice := _CHOICES.get(kind)) is not None:
        equalizer = Equalizer(model.graph, others, embeddings, rows or {}, choice)
        others, embeddings = equalizer.equalize(), equalizer.embeddings
        equalized = equalizer.done
        weights += _weights(others, embeddings)
    if kind == "int8-dynamic":  # whose products are exact in any case
        _dynamic(model, others, embeddings)
    else:
        num_left = _blockwise(model, others, embeddings, kind, is_exact=is_exact)
    PassManager([common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass()])(model)
    _release(model.graph, weights)
    return Quantized(
        num_linears=len(others) - num_left,
        num_embeddings=len(embeddings),
        num_routers=len(routers),
        num_expert_products=num_left,
        equalized=equalized,
    )


def _weights(linears: list[Linear], embeddings: list[ir.Node]) -> list[ir.Value | None]:
    return [*(linear.weight for linear in linears), *(node.inputs[0] for node in embeddings)]


def _release(graph: ir.Graph, weights: list[ir.Value | None]) -> None:
    """Release the weights that left the graph: only the tensors derived from them keep them."""
    for weight in weights:
        if weight is not None and weight.name not in graph.initializers:
            weight.const_value = None


def _dynamic(model: ir.Model, linears: list[Linear], embeddings: list[ir.Node]) -> None:
    looked_up = {node.inputs[0] for node in embeddings}
    quantizer = DynamicQuantizer(model.graph)
    for linear in linears:
        quantizer.quantize_linear(linear, is_shared=linear.weight in looked_up)
    for node in embeddings:
        quantizer.quantize_embedding(node)


def _blockwise(
    model: ir.Model, linears: list[Linear], embeddings: list[ir.Node], kind: str, *, is_exact: bool
) -> int:
    """Quantize all but experts; return how many products were left as they are."""
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
