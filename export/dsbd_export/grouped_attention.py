"""Attention with query heads that share a key head as rows of one head: each key is read once.

With G = H / Hkv query heads to a key head, the node that was

    Attention(query [1,H,S,D], key [1,Hkv,C,D], value, mask [1,1,S,C])

becomes the same node over Hkv heads of G*S rows. Query heads of one key head lie side by side, so
both reshapes move nothing: row s of query head h*G + g is row g*S + s of head h, and the mask is
repeated G times. With G = 2 and S = 3, row 1 of query head 5 is row 4 of head 2.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes import PassManager, common
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet


class GroupQueryHeads(RewriteRuleClassBase):  # type: ignore[misc]  # untyped library
    """Attention over H query heads -> Attention over Hkv heads of G*S rows."""

    def pattern(
        self, op: Any, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value
    ) -> Any:
        """Return the one node that the capture makes."""
        return op.Attention(
            query, key, value, mask, _outputs=["attended"], _allow_other_attributes=True
        )

    def check(
        self, context: Any, query: ir.Value, key: ir.Value, **others: ir.Value
    ) -> MatchResult:
        """Accept several query heads to a key head, all of known number and width."""
        result = MatchResult()
        for value in (query, key, others["value"]):
            if _heads_and_width(value) is None:
                return result.fail("heads are not known as (1, H, rows, D)", value)
        if query.shape[1] == key.shape[1]:  # type: ignore[index]  # as checked above
            return result.fail("every query head has a key head of its own", query)
        return result

    def rewrite(
        self,
        op: Any,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        mask: ir.Value,
        attended: ir.Value,
    ) -> Any:
        """Return the node between two reshapes."""
        num_heads, head_dim = _known_heads_and_width(query)
        num_key_heads, value_dim = _known_heads_and_width(value)
        node = attended.producer()
        assert node is not None  # the pattern is this node
        rows = op.Reshape(query, op.Constant(value_ints=[1, num_key_heads, -1, head_dim]))
        repeats = op.Constant(value_ints=[1, 1, num_heads // num_key_heads, 1])
        grouped = op.Attention(rows, key, value, op.Tile(mask, repeats), **node.attributes)
        return op.Reshape(grouped, op.Constant(value_ints=[1, num_heads, -1, value_dim]))


def group_query_heads(model: ir.Model) -> int:
    """Rewrite every Attention with shared key heads, in place; return how many there were."""
    num_grouped = RewriteRuleSet([GroupQueryHeads.rule()]).apply_to_model(model)
    PassManager(
        [
            common.CommonSubexpressionEliminationPass(),  # all layers share one repeated mask
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.RemoveUnusedNodesPass(),
        ]
    )(model)
    return int(num_grouped)


def _heads_and_width(value: ir.Value) -> tuple[int, int] | None:
    """Return H and D of a value (1, H, rows, D) where both are known numbers."""
    if value.shape is None or len(value.shape) != 4:
        return None
    heads, width = value.shape[1], value.shape[3]
    return (heads, width) if isinstance(heads, int) and isinstance(width, int) else None


def _known_heads_and_width(value: ir.Value) -> tuple[int, int]:
    found = _heads_and_width(value)
    assert found is not None  # as checked
    return found
