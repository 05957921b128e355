"""Passes on drawn graphs: the same values by other operators, and graphs that stay as they are."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import OPSET
from dsbd_export.passes.known_shapes import fix_expansions, fix_reshapes
from dsbd_export.passes.merged_products import merge_products, transpose_before_split
from dsbd_export.passes.optimize import group_query_heads, optimize_graph
from tests.export.conftest import parsed_graph
from tests.ort_sessions import cpu_session

IN, NUM_ROWS = 32, 5
SIZES = {"query": 24, "key": 8, "value": 8}
PRODUCTS = {  # by kind: as captured graphs have them, {0} the result and {1} the rows
    "MatMul": "{0} = MatMul ({1}, {0}_weight)",
    "Transpose": "{0}_t = Transpose <perm = [1, 0]> ({0}_weight) {0} = MatMul ({1}, {0}_t)",
    "Gemm": "{0} = Gemm <transB = 1> ({1}, {0}_weight)",
    "biased Gemm": "{0} = Gemm <transB = 1> ({1}, {0}_weight, {0}_bias)",
}


def product(kind: str, name: str, rows: str = "x") -> tuple[str, dict[str, Any]]:
    """Return the text of a product of rows, and the shapes of its weights."""
    size = SIZES[name.rpartition("_")[2]]
    shape = (IN, size) if kind == "MatMul" else (size, IN)
    return PRODUCTS[kind].format(name, rows), {f"{name}_weight": shape, f"{name}_bias": (size,)}


def graph_of(*steps: tuple[str, dict[str, Any]], outputs: list[str], known: str = "") -> Any:
    """Return a graph of rows x and y that ends in a head, so that no other product is the last.

    steps: texts, with shapes of weights, which are drawn, or arrays. known: types of values.
    """
    rng = np.random.default_rng(0)
    weights = {"head_weight": (IN, 16)} | {n: w for _, given in steps for n, w in given.items()}
    for name, value in weights.items():
        if isinstance(value, tuple):
            weights[name] = rng.standard_normal(value, dtype=np.float32)
    body = " ".join(text for text, _ in steps)
    types = [f"float[{'?, ?, ' * name.endswith('read')}?, ?] {name}" for name in outputs]
    return parsed_graph(
        f"""(float[S, {IN}] x, float[S, {IN}] y) => ({", ".join(types)}, float[S, 16] logits)
        {known and f"<{known}>"} {{ {body} logits = MatMul (x, head_weight) }}""",
        **weights,
    )


def check_kept(
    model: onnx.ModelProto, change: Callable[[ir.Model], int], number: int, tolerance: float = 1e-6
) -> ir.Graph:
    """Check that a pass makes some changes and keeps all outputs and their values."""
    changed = ir.from_proto(model)
    assert change(changed) == number
    rng = np.random.default_rng(1)
    fed = {name: rng.standard_normal((NUM_ROWS, IN), dtype=np.float32) for name in "xy"}
    found, wanted = (cpu_session(each).run(None, fed) for each in (changed, model))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    names = [output.name for output in model.graph.output]
    assert [output.name for output in changed.graph.outputs] == names
    return changed.graph


def operators(graph: ir.Graph) -> dict[str, int]:
    return dict(Counter(node.op_type for node in graph))


FORMS = {  # by kind: operators of the merged products and of the head
    "MatMul": {"MatMul": 2, "Split": 1},
    "Transpose": {"Transpose": 1, "MatMul": 2, "Split": 1},
    "Gemm": {"Gemm": 1, "Split": 1, "MatMul": 1},
    "biased Gemm": {"Gemm": 1, "Split": 1, "MatMul": 1},
}


@pytest.mark.parametrize("kind", FORMS)
def test_one_product_instead_of_three(kind):
    model = graph_of(*(product(kind, name) for name in SIZES), outputs=[*SIZES])
    graph = check_kept(model, merge_products, 1)
    assert operators(graph) == FORMS[kind]
    assert not {f"{name}_weight" for name in SIZES} & {*graph.initializers}  # they are stored once


def test_each_rows_have_their_own():
    names = {f"{rows}_{name}": rows for rows in "xy" for name in SIZES}
    model = graph_of(*(product("MatMul", *each) for each in names.items()), outputs=[*names])
    assert operators(check_kept(model, merge_products, 2)) == {"MatMul": 3, "Split": 2}


def test_what_stays():
    """Products with and without a bias, stored in different ways, of one weight, or routers."""
    steps = [product("biased Gemm", "a_query"), product("MatMul", "b_query")]
    steps += [product("MatMul", "b_key"), ("again = MatMul (x, b_key_weight)", {})]
    router = "routed = MatMul (x, router_weight) chances = Softmax (routed)"
    outputs = ["a_query", "b_query", "b_key", "again", "chances"]
    model = graph_of(*steps, (router, {"router_weight": (IN, 4)}), outputs=outputs)
    graph = check_kept(model, merge_products, 0)
    assert operators(graph) == {"Gemm": 1, "MatMul": 5, "Softmax": 1}


def test_an_exported_layer_has_four_products(exported):
    for role, num_layers in (("target", 2), ("draft", 1)):
        graph = exported.graph(role)
        splits = [node for node in graph.node if node.op_type == "Split"]
        assert len(splits) == 2 * num_layers  # query, key and value; gate and up
        assert sum("merged." in tensor.name for tensor in graph.initializer) >= 2 * num_layers


def with_heads(*, widths=(4, 4, 4), perm=(0, 2, 1, 3), reader=None):
    """Return a graph of three products, each turned to heads by rows; ``reader`` reads one too."""
    steps, known = [], []
    for (name, size), width in zip(SIZES.items(), widths, strict=True):
        shape = np.array([1, -1, size // width, width], np.int64)
        text = """{0}_heads = Reshape ({0}, {0}_shape)
            {0}_turned = Transpose <perm = {1}> ({0}_heads)
            {0}_read = Abs ({0}_turned)"""  # as attention would
        steps += [product("MatMul", name), (text.format(name, [*perm]), {f"{name}_shape": shape})]
        known.append(f"float[1, {size // width}, S, {width}] {name}_turned")
    outputs = [f"{name}_read" for name in SIZES]
    if reader:
        outputs.append("negative" if reader in SIZES else "negative_read")
        steps.append((f"{outputs[-1]} = Neg ({reader})", {}))
    return graph_of(*steps, outputs=outputs, known=", ".join(known))


def merge_and_turn(model: ir.Model) -> int:
    merge_products(model)
    return transpose_before_split(model.graph)


def test_heads_are_transposed_together():
    found = operators(check_kept(with_heads(), merge_and_turn, 1, tolerance=0))
    assert found == {"MatMul": 2, "Reshape": 1, "Transpose": 1, "Split": 1, "Abs": 3}


OTHER_HEADS = {
    "widths": {"widths": (4, 4, 8)},
    "order": {"perm": (0, 2, 3, 1)},
    "read before": {"reader": "key"},
    "read between": {"reader": "value_heads"},
}


@pytest.mark.parametrize("other", OTHER_HEADS)
def test_other_heads_stay(other):
    graph = check_kept(with_heads(**OTHER_HEADS[other]), merge_and_turn, 0)
    assert operators(graph)["Transpose"] == 3


def test_heads_with_keys_of_their_own_stay():
    graph = ir.from_proto(
        parsed_graph(
            """(float[1, 2, S, 8] q, float[1, 2, C, 8] k, float[1, 2, C, 8] v, bool[1, 1, S, C] m)
            => (float[1, 2, S, 8] y) {y = Attention <scale = 0.5> (q, k, v, m)}"""
        )
    )
    assert group_query_heads(graph) == 0 and operators(graph.graph) == {"Attention": 1}


DIMENSIONS = [  # (operator, shape before, shape after, constant dimensions if there are any)
    ("Reshape", '1, 2, "2*S", C', "1, 4, S, C", [1, 4, -1, 0]),
    ("Reshape", "1, 4, S, 8", '1, 2, "2*S", 8', [1, 2, -1, 8]),
    ("Reshape", "1, S, 32", "1, S, 4, 8", [1, 0, 4, 8]),
    ("Reshape", "S, C", "C, S", None),
    ("Reshape", "1, ?, ?", "1, ?, ?", None),
    ("Expand", "1, S, 2, 1, 8", "1, S, 2, 4, 8", [1, 1, 2, 4, 8]),  # key heads, one for each query
    ("Expand", "R, 1", "R, 300", [1, 300]),
    ("Expand", "8", "2, 4, 8", [2, 4, 8]),
    ("Expand", "1, 4, 1, 1", "1, 4, S, 1", None),
    ("Expand", "8", "R, 8", None),
    ("Expand", "1, ?", "1, ?", None),
]


@pytest.mark.parametrize(("operator", "source", "result", "dims"), DIMENSIONS)
def test_dimensions_are_constant_if_they_can_be(operator, source, result, dims):
    num_dims = len(result.split(","))
    text = f"(float[{source}] x, int64[{num_dims}] dims) => (float[{result}] y)"
    model = ir.from_proto(parsed_graph(f"{text} {{y = {operator} (x, dims)}}"))
    fix = {"Reshape": fix_reshapes, "Expand": fix_expansions}[operator]
    assert fix(model) == (dims is not None)
    [node] = [node for node in model.graph if node.op_type == operator]
    constant = ir.convenience.get_const_tensor(node.inputs[1])
    assert (constant and constant.numpy().tolist()) == dims


SIZE = 7


class Assigned(nn.Module):
    """Two tensors assigned to places of a third one, twice, as layers do."""

    def __init__(self, places: tuple[slice, slice]) -> None:
        super().__init__()
        self.places = places

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.assigned(a, b), self.assigned(a + 1, b)

    def assigned(self, a: Tensor, b: Tensor) -> Tensor:
        x = a.new_zeros(*a.shape[:-1], SIZE)
        for place, part in zip(self.places, (a, b), strict=True):
            x[..., place] = part
        return x


PLACES = [  # (places, whether they are concatenated)
    ((slice(0, 3), slice(3, SIZE)), True),  # latent attention: a head's part without positions
    ((slice(3, SIZE), slice(0, 3)), False),  # in the other order
    ((slice(0, 3), slice(2, SIZE)), False),  # one over the other
    ((slice(0, 3), slice(4, SIZE)), False),  # a place is left
    ((slice(1, SIZE, 3), slice(2, SIZE, 3)), False),  # positions of three axes, interleaved
]


@pytest.mark.parametrize(("places", "joins"), PLACES)
def test_parts_that_fill_a_tensor_are_concatenated_and_others_stay(places, joins):
    """Tensors of three dimensions, some rows in the middle."""
    module = Assigned(places).eval()
    inputs = tuple(torch.randn(2, 3, len(range(SIZE)[place])) for place in places)
    rows = torch.export.Dim("S")
    options = {"opset_version": OPSET, "dynamo": True, "verbose": False, "optimize": False}
    with quiet_libraries():
        program = torch.onnx.export(
            module,
            inputs,
            input_names=["a", "b"],
            dynamic_shapes=({1: rows}, {1: rows}),
            **options,
        )
    program.optimize()
    optimize_graph(program.model)
    counts = Counter(operators(program.model.graph))
    assert counts["ScatterND"] == (0 if joins else 4)
    assert not counts["Range"] and not counts["Gather"]  # known places are constants
    if joins:
        assert counts["Concat"] == 2 and not {"Shape", "ConstantOfShape", "Transpose"} & {*counts}
    found = cpu_session(program.model).run(None, {"a": inputs[0].numpy(), "b": inputs[1].numpy()})
    for array, wanted in zip(found, module(*inputs), strict=True):
        np.testing.assert_array_equal(array, wanted.numpy())
