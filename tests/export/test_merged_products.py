"""Passes that join: products of the same rows, heads, and parts assigned to a tensor."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import OPSET
from dsbd_export.passes.merged_products import merge_products, transpose_before_split
from dsbd_export.passes.optimize import optimize_graph
from tests.ort_sessions import cpu_session

IN, ROWS = 32, 5
SIZES = {"query": 24, "key": 8, "value": 8}


def products(kind: str, prefix: str, rows: str, *, bias: bool = False):
    """Return nodes and weights of three products of ``rows``, as captured graphs have them."""
    nodes, weights = [], {}
    for name, size in SIZES.items():
        weight, result = f"{prefix}{name}.weight", f"{prefix}{name}"
        weights[weight] = (IN, size) if kind == "MatMul" else (size, IN)
        inputs = [rows, weight]
        if bias:
            weights[f"{result}.bias"] = (size,)
            inputs.append(f"{result}.bias")
        if kind == "Transpose":
            nodes.append(helper.make_node("Transpose", [weight], [f"{weight}.turned"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", [rows, f"{weight}.turned"], [result]))
        elif kind == "Gemm":
            nodes.append(helper.make_node("Gemm", inputs, [result], transB=1))
        else:
            nodes.append(helper.make_node("MatMul", inputs, [result]))
    return nodes, weights


def graph_of(nodes, weights, outputs, inputs=("x",)) -> onnx.ModelProto:
    """Return a graph that ends in a head, so that no product of interest is the last one.

    weights: by name the shape, of random ones, or the array.
    """
    rng = np.random.default_rng(0)
    weights = weights | {"head.weight": (IN, 16)}
    nodes = [*nodes, helper.make_node("MatMul", [inputs[0], "head.weight"], ["logits"])]
    arrays = {
        name: rng.standard_normal(value, dtype=np.float32) if isinstance(value, tuple) else value
        for name, value in weights.items()
    }
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["S", IN]) for name in inputs],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["S", None])
            for name in (*outputs, "logits")
        ],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    model.ir_version = 10
    return model


def results(model: onnx.ModelProto, inputs=("x",)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    fed = {name: rng.standard_normal((ROWS, IN), dtype=np.float32) for name in inputs}
    return cpu_session(model).run(None, fed)


def assert_same(found, model, *inputs, **tolerance):
    for one, other in zip(results(found, *inputs), results(model, *inputs), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def merged(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    changed = ir.from_proto(model)
    number = merge_products(changed)
    return ir.to_proto(changed), number


def counts(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.node))


FORMS = [  # (kind, bias, operators of the merged products, without the head)
    ("MatMul", False, {"MatMul": 1, "Split": 1}),
    ("Transpose", False, {"Transpose": 1, "MatMul": 1, "Split": 1}),
    ("Gemm", False, {"Gemm": 1, "Split": 1}),
    ("Gemm", True, {"Gemm": 1, "Split": 1}),
]


@pytest.mark.parametrize(("kind", "bias", "operators"), FORMS)
def test_one_product_instead_of_three(kind, bias, operators):
    model = graph_of(*products(kind, "", "x", bias=bias), list(SIZES))
    found, number = merged(model)
    assert number == 1
    operators = Counter(operators) + Counter({"MatMul": 1})
    assert counts(found) == operators
    assert [output.name for output in found.graph.output] == [*SIZES, "logits"]
    weights = {tensor.name for tensor in found.graph.initializer}
    assert not {f"{name}.weight" for name in SIZES} & weights  # they are stored once
    assert_same(found, model, rtol=1e-6, atol=1e-6)


def test_each_rows_have_their_own():
    first, second = products("MatMul", "a.", "x"), products("MatMul", "b.", "y")
    outputs = [f"{prefix}{name}" for prefix in ("a.", "b.") for name in SIZES]
    model = graph_of([*first[0], *second[0]], first[1] | second[1], outputs, ("x", "y"))
    found, number = merged(model)
    assert number == 2 and counts(found) == {"MatMul": 3, "Split": 2}
    assert_same(found, model, ("x", "y"), rtol=1e-6, atol=1e-6)


def test_what_stays():
    """Products with and without a bias, stored in different ways, of one weight, or routers."""
    biased, weights = products("Gemm", "a.", "x", bias=True)
    plain, more = products("MatMul", "b.", "x")
    route = [
        helper.make_node("MatMul", ["x", "router.weight"], ["routed"]),
        helper.make_node("Softmax", ["routed"], ["chances"]),
    ]
    twice = [helper.make_node("MatMul", ["x", "b.key.weight"], ["again"])]
    nodes = [biased[0], plain[0], plain[1], *twice, *route]
    outputs = ["a.query", "b.query", "b.key", "again", "chances"]
    needed = {name: shape for name, shape in (weights | more).items() if "value" not in name}
    needed = {n: s for n, s in needed.items() if not n.startswith("a.key")}
    model = graph_of(nodes, needed | {"router.weight": (IN, 4)}, outputs)
    found, number = merged(model)
    assert number == 0 and counts(found) == counts(model)


def test_an_exported_layer_has_four_products(exported):
    for role, num_layers in (("target", 2), ("draft", 1)):
        graph = exported.graph(role)
        splits = [node for node in graph.node if node.op_type == "Split"]
        assert len(splits) == 2 * num_layers  # query, key and value; gate and up
        assert sum("merged." in tensor.name for tensor in graph.initializer) >= 2 * num_layers


WIDTH = 4
HEADS = {name: size // WIDTH for name, size in SIZES.items()}


def with_heads(*, widths=(WIDTH, WIDTH, WIDTH), perm=(0, 2, 1, 3), reader=None):
    """Return a graph of three products, each turned to heads by rows; ``reader`` reads one too."""
    nodes, weights = products("MatMul", "", "x")
    outputs, known = [], []
    for (name, size), width in zip(SIZES.items(), widths, strict=True):
        heads, shape, rows = f"{name}.heads", f"{name}.shape", f"{name}.turned"
        weights[shape] = np.array([1, -1, size // width, width], np.int64)
        nodes += [
            helper.make_node("Reshape", [name, shape], [heads]),
            helper.make_node("Transpose", [heads], [rows], perm=list(perm)),
            helper.make_node("Abs", [rows], [f"{name}.read"]),  # as attention would
        ]
        outputs.append(f"{name}.read")
        dims = [1, size // width, "S", width]
        known.append(helper.make_tensor_value_info(rows, TensorProto.FLOAT, dims))
    if reader:
        nodes.append(helper.make_node("Neg", [reader], ["negative"]))
        outputs.append("negative")
    model = graph_of(nodes, weights, outputs)
    model.graph.value_info.extend(known)
    return model


def turned(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    changed = ir.from_proto(model)
    merge_products(changed)
    number = transpose_before_split(changed.graph)
    return ir.to_proto(changed), number


def test_heads_are_transposed_together():
    model = with_heads()
    found, number = turned(model)
    assert number == 1
    assert counts(found) == {"MatMul": 2, "Reshape": 1, "Transpose": 1, "Split": 1, "Abs": 3}
    assert_same(found, model, rtol=0)


@pytest.mark.parametrize(
    "other",
    [
        {"widths": (4, 4, 8)},
        {"perm": (0, 2, 3, 1)},
        {"reader": "key"},
        {"reader": "value.heads"},
    ],
    ids=["widths", "order", "read before", "read between"],
)
def test_other_heads_stay(other):
    model = with_heads(**other)
    found, number = turned(model)
    assert number == 0 and counts(found)["Transpose"] == 3
    assert_same(found, model, rtol=1e-6, atol=1e-6)


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


def captured(places: tuple[slice, slice]) -> tuple[ir.Model, list[Tensor], nn.Module]:
    """The optimized graph of tensors of three dimensions, some rows in the middle."""
    widths = [len(range(SIZE)[place]) for place in places]
    inputs = [torch.randn(2, 3, width) for width in widths]
    rows = torch.export.Dim("S")
    with quiet_libraries():
        program = torch.onnx.export(
            Assigned(places).eval(),
            tuple(inputs),
            input_names=["a", "b"],
            dynamic_shapes=({1: rows}, {1: rows}),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            optimize=False,
        )
    assert program is not None
    program.optimize()
    optimize_graph(program.model)
    return program.model, inputs, Assigned(places)


@pytest.mark.parametrize(
    ("places", "concatenations"),
    [
        (
            (slice(0, 3), slice(3, SIZE)),
            2,
        ),  # latent attention: a head's part without positions
        ((slice(3, SIZE), slice(0, 3)), 0),  # in the other order
        ((slice(0, 3), slice(2, SIZE)), 0),  # one over the other
        ((slice(0, 3), slice(4, SIZE)), 0),  # a place is left
        (
            (slice(1, SIZE, 3), slice(2, SIZE, 3)),
            0,
        ),  # positions of three axes, interleaved
    ],
)
def test_parts_that_fill_a_tensor_are_concatenated_and_others_stay(places, concatenations):
    model, inputs, module = captured(places)
    counts = Counter(node.op_type for node in model.graph)
    assert counts["ScatterND"] == 2 * (2 - concatenations)
    assert not counts["Range"] and not counts["Gather"]  # known places are constants
    if concatenations:
        assert counts["Concat"] == 2 and not {"Shape", "ConstantOfShape", "Transpose"} & set(counts)
    found = cpu_session(model).run(None, {"a": inputs[0].numpy(), "b": inputs[1].numpy()})
    for array, wanted in zip(found, module(*inputs), strict=True):
        np.testing.assert_array_equal(array, wanted.numpy())
