"""Rewrite rules of a captured graph: pieces fused into single nodes, query heads grouped.

Every rule keeps the meaning for any model, so no rule is for one family only. Norms and rotary
embeddings become ONNX's single nodes RMSNormalization and RotaryEmbedding. One Gather selects the
logit rows. An output head that shares the embedding's weight reads it without a transposition.

In fp16 and bf16, transformers computes norms and angles in fp32 between casts. RMSNormalization
does the same internally (``stash_type=1``: normalised in fp32, rounded, then scaled), so the casts
are removed.

``group_query_heads`` turns query heads that share a key head into rows of one head, so that each
key is read once. With G = H / Hkv query heads per key head, the node

    Attention(query [1,H,S,D], key [1,Hkv,C,D], value, mask [1,1,S,C])

becomes the same node over Hkv heads of G*S rows. Query heads of one key head are adjacent, so both
reshapes move no data: row s of query head h*G + g is row g*S + s of head h. The mask is repeated G
times, as numbers to add, because CUDA cannot repeat bools. With G = 2 and S = 3, row 1 of query
head 5 is row 4 of head 2.
"""

from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes import PassManager, common
from onnxscript.rewriter import MatchResult, RewriteRule, RewriteRuleClassBase, RewriteRuleSet

from dsbd_export.config import HIDDEN
from dsbd_export.passes.known_shapes import fix_expansions, fix_known_dimensions, fix_reshapes


class FuseRMSNormalization(RewriteRuleClassBase):  # type: ignore[misc]  # untyped library
    """``scale * (x / sqrt(mean(x^2) + epsilon))`` -> RMSNormalization.

    ``is_cast``: ``scale * cast(x32 / sqrt(mean(x32^2) + epsilon))`` with x32 = cast(x). Norms that
    scale before the cast back (Gemma, OLMo2) round differently; they match without ``is_cast``.
    """

    def __init__(self, *, is_cast: bool) -> None:
        super().__init__()
        self._is_cast = is_cast

    def pattern(self, op: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value) -> Any:
        mean_square = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1)
        normed = x * op.Reciprocal(op.Sqrt(mean_square + epsilon))
        return scale * (op.Cast(normed) if self._is_cast else normed)

    def check(self, context: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value) -> MatchResult:
        result = MatchResult()
        if self._is_cast:
            low = _before_cast(x)
            if low is None or x.dtype != ir.DataType.FLOAT:
                return result.fail("x is not cast to fp32", x)
            if scale.dtype is None or low.dtype != scale.dtype:
                return result.fail("x and the scale differ in type", scale)
        if _scalar(epsilon) is None:
            return result.fail("epsilon is no constant", epsilon)
        if scale.shape is None or len(scale.shape) != 1:
            return result.fail("the scale is no vector", scale)
        return result

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, epsilon: ir.Value) -> Any:
        rows = _before_cast(x) if self._is_cast else x
        return op.RMSNormalization(rows, scale, axis=-1, epsilon=_scalar(epsilon), stash_type=1)


def _before_cast(value: ir.Value) -> ir.Value | None:
    cast = value.producer()
    return None if cast is None or cast.op_type != "Cast" else cast.inputs[0]


class FuseRotaryEmbedding(RewriteRuleClassBase):  # type: ignore[misc]  # untyped library
    """``x * cos + rotate_half(x) * sin`` with equal halves of cos and sin -> RotaryEmbedding.

    ``is_scaled``: cos and sin are multiplied by a constant, as with yarn. ``is_cast``: they are
    computed in fp32 and cast to the type of x.
    """

    def __init__(self, *, is_scaled: bool, is_cast: bool) -> None:
        super().__init__(remove_nodes=False)  # all layers share cos and sin
        self._is_scaled = is_scaled
        self._is_cast = is_cast

    def pattern(
        self,
        op: Any,
        x: ir.Value,
        angles: ir.Value,
        scaling: ir.Value,
        axis: ir.Value,
        first_start: ir.Value,
        first_end: ir.Value,
        second_start: ir.Value,
        second_end: ir.Value,
    ) -> Any:
        """Return the pattern of transformers' rotary modules; angles: (1, S, D/2)."""
        both = op.Concat(angles, angles, axis=-1)
        cos, sin = op.Cos(both), op.Sin(both)
        if self._is_scaled:
            cos, sin = cos * scaling, sin * scaling
        if self._is_cast:
            cos, sin = op.Cast(cos), op.Cast(sin)
        first_half = op.Slice(x, first_start, first_end, [3], [1])
        second_half = op.Slice(x, second_start, second_end, [3], [1])
        rotated = op.Concat(op.Neg(second_half), first_half, axis=-1)
        return x * op.Unsqueeze(cos, axis) + rotated * op.Unsqueeze(sin, axis)

    def check(self, context: Any, x: ir.Value, axis: ir.Value, **others: ir.Value) -> MatchResult:
        result = MatchResult()
        if x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[3], int):
            return result.fail("x is not known as (1, H, S, D)", x)
        half = x.shape[3] // 2
        cuts = [
            _scalar(others[f"{part}_{end}"])
            for part in ("first", "second")
            for end in ("start", "end")
        ]
        if cuts[:3] != [0, half, half] or cuts[3] is None or cuts[3] < 2 * half:
            return result.fail("x is not cut in the middle", x)
        if _scalar(axis) != 1:
            return result.fail("cos and sin are not spread over the heads", axis)
        if self._is_scaled and _scalar(others["scaling"]) is None:
            return result.fail("the scaling is no constant", others["scaling"])
        return result

    def rewrite(self, op: Any, x: ir.Value, angles: ir.Value, **others: ir.Value) -> Any:
        cos, sin = op.Cos(angles), op.Sin(angles)
        if self._is_scaled:
            cos, sin = op.Mul(cos, others["scaling"]), op.Mul(sin, others["scaling"])
        if self._is_cast:
            cos, sin = op.Cast(cos, to=x.dtype), op.Cast(sin, to=x.dtype)
        return op.RotaryEmbedding(x, cos, sin)


def _rows_by_transposes(op: Any, hidden: ir.Value, rows: ir.Value, axis: ir.Value) -> Any:
    """Return ``hidden[:, rows]`` in the form that torch exports; hidden: (1, S, H), rows: (R,)."""
    by_row = op.GatherND(op.Transpose(hidden, perm=[1, 0, 2]), op.Unsqueeze(rows, axis))
    return op.Transpose(by_row, perm=[1, 0, 2])


def _rows_by_gather(op: Any, hidden: ir.Value, rows: ir.Value, axis: ir.Value) -> Any:
    return op.Gather(hidden, rows, axis=1)


class ReadTiedWeight(RewriteRuleClassBase):  # type: ignore[misc]  # untyped library
    """MatMul with a transposed weight, which remains only if other nodes read it too -> Gemm."""

    def pattern(self, op: Any, x: ir.Value, weight: ir.Value) -> Any:
        """Return the pattern of the product; x: (1, R, H), weight: (V, H)."""
        return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))

    def check(self, context: Any, x: ir.Value, weight: ir.Value) -> MatchResult:
        result = MatchResult()
        if weight.const_value is None:
            return result.fail("no weight", weight)
        if x.shape is None or len(x.shape) != 3 or x.shape[0] != 1:
            return result.fail("x is not known as (1, R, H)", x)
        return result

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value) -> Any:
        batch = op.Constant(value=ir.tensor([0]))
        return op.Unsqueeze(op.Gemm(op.Squeeze(x, batch), weight, transB=1), batch)


class ConcatenateParts(RewriteRuleClassBase):  # type: ignore[misc]  # untyped library
    """``x[..., :k] = a; x[..., k:] = b``, which overwrite all of x -> Concat."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)  # all layers share x

    def pattern(
        self,
        op: Any,
        x: ir.Value,
        a: ir.Value,
        b: ir.Value,
        first: ir.Value,
        second: ir.Value,
        swap: Any,
    ) -> Any:
        begun = op.ScatterND(op.Transpose(x, perm=swap), first, op.Transpose(a, perm=swap))
        begun = op.Transpose(op.Transpose(begun, perm=swap), perm=swap)
        done = op.ScatterND(begun, second, op.Transpose(b, perm=swap))
        return op.Transpose(done, perm=swap)

    def check(
        self, context: Any, a: ir.Value, b: ir.Value, x: ir.Value, swap: ir.Attr, **places: ir.Value
    ) -> MatchResult:
        result = MatchResult()
        axes = list(swap.as_ints())
        if axes != [len(axes) - 1, *range(1, len(axes) - 1), 0]:
            return result.fail("the assignments are not to the last axis", x)
        width = None if x.shape is None else x.shape[-1]
        indices = [ir.convenience.get_const_tensor(places[name]) for name in ("first", "second")]
        covered = [place for each in indices if each for place in each.numpy().ravel().tolist()]
        if not isinstance(width, int) or covered != list(range(width)):
            return result.fail("the places are not the whole axis", x)
        return result

    def rewrite(self, op: Any, a: ir.Value, b: ir.Value, **others: Any) -> Any:
        return op.Concat(a, b, axis=-1)


def fuse_norms(model: ir.Model) -> None:
    """Fuse each RMS norm into a single node, in place."""
    common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(model)
    rules = [FuseRMSNormalization.rule(is_cast=is_cast) for is_cast in (False, True)]
    RewriteRuleSet(rules, commute=True).apply_to_model(model)


def optimize_graph(model: ir.Model) -> None:
    """Apply the rules in place; remove unused nodes and metadata about this machine."""
    fuse_norms(model)
    fix_known_dimensions(model)
    RewriteRuleSet([ConcatenateParts.rule()]).apply_to_model(model)
    rotary = [
        FuseRotaryEmbedding.rule(is_scaled=is_scaled, is_cast=is_cast)
        for is_scaled in (False, True)
        for is_cast in (False, True)
    ]
    RewriteRuleSet(rotary, commute=True).apply_to_model(model)
    by_gather = RewriteRule(_rows_by_transposes, _rows_by_gather)
    RewriteRuleSet([by_gather, ReadTiedWeight.rule()]).apply_to_model(model)
    unsqueezed = RewriteRule(
        lambda op, x: op.Squeeze(op.Unsqueeze(x, [0]), [0]), lambda op, x: op.Identity(x)
    )
    RewriteRuleSet([unsqueezed]).apply_to_model(model)
    fix_reshapes(model)
    fix_expansions(model)
    PassManager(
        [
            common.InlinePass(),
            common.IdentityEliminationPass(),
            common.CommonSubexpressionEliminationPass(),
            common.LiftConstantsToInitializersPass(size_limit=0),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
            common.ClearMetadataAndDocStringPass(),
        ]
    )(model)


def _scalar(value: ir.Value) -> Any:
    """Return the number in a constant of size one, None for other values."""
    constant = ir.convenience.get_const_tensor(value)
    return None if constant is None or constant.size != 1 else constant.numpy().item()


class GroupQueryHeads(RewriteRuleClassBase):  # type: ignore[misc]  # untyped library
    """Attention over H query heads -> Attention over Hkv heads of G*S rows."""

    def pattern(
        self, op: Any, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value
    ) -> Any:
        return op.Attention(
            query, key, value, mask, _outputs=["attended"], _allow_other_attributes=True
        )

    def check(
        self, context: Any, query: ir.Value, key: ir.Value, **others: ir.Value
    ) -> MatchResult:
        result = MatchResult()
        for value in (query, key, others["value"]):
            if heads_and_width(value) is None:
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
        num_heads, head_dim = known_heads_and_width(query)
        num_key_heads, value_dim = known_heads_and_width(value)
        node = attended.producer()
        assert node is not None  # the pattern is this node
        rows = op.Reshape(query, op.Constant(value_ints=[1, num_key_heads, -1, head_dim]))
        repeats = op.Constant(value_ints=[1, 1, num_heads // num_key_heads, 1])
        added = op.Where(mask, op.Constant(value_float=0.0), op.Constant(value_float=HIDDEN))
        if query.dtype != ir.DataType.FLOAT:
            added = op.Cast(added, to=query.dtype)
        grouped = op.Attention(rows, key, value, op.Tile(added, repeats), **node.attributes)
        return op.Reshape(grouped, op.Constant(value_ints=[1, num_heads, -1, value_dim]))


def group_query_heads(model: ir.Model) -> int:
    """Rewrite every Attention with shared key heads, in place; return their number."""
    num_grouped = RewriteRuleSet([GroupQueryHeads.rule()]).apply_to_model(model)
    PassManager(
        [
            common.CommonSubexpressionEliminationPass(),  # all layers share one repeated mask
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.RemoveUnusedNodesPass(),
        ]
    )(model)
    return int(num_grouped)


def added_mask(tape: ir.tape.Tape, mask: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """Return a mask (1, 1, S, C) bool as numbers to add to scores of ``dtype``: 0 and HIDDEN."""
    seen, hidden = (
        tape.op("Constant", [], {"value": ir.tensor([number], ir.DataType.FLOAT)})
        for number in (0.0, HIDDEN)
    )
    added = tape.op("Where", [mask, seen, hidden])
    if dtype in (None, ir.DataType.FLOAT):
        return added
    return tape.op("Cast", [added], {"to": dtype})


def heads_and_width(value: ir.Value) -> tuple[int, int] | None:
    """Return H and D of a value (1, H, rows, D), None unless both are known numbers."""
    if value.shape is None or len(value.shape) != 4:
        return None
    heads, width = value.shape[1], value.shape[3]
    return (heads, width) if isinstance(heads, int) and isinstance(width, int) else None


def known_heads_and_width(value: ir.Value) -> tuple[int, int]:
    """Return H and D of a value (1, H, rows, D); the caller has checked that both are known."""
    sizes = heads_and_width(value)
    assert sizes is not None  # as checked
    return sizes
