"""Attention in the graph: what it computes where it is decomposed, and what it refuses."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsbd_export.capture.replacements import (
    ReplaceTorchFunctions,
    additive_mask,
    capped_attention,
    forest_attention,
    refuse_own_mask,
)
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.passes.known_shapes import fix_expansions, fix_reshapes
from dsbd_export.pipeline import export_model
from scripts.family_checkpoints import write_family_checkpoint

QUERY = torch.zeros(1, 4, 3, 8)  # four heads of eight, three rows
KEY = torch.zeros(1, 2, 16, 8)
MASK = torch.ones(1, 1, 3, 16, dtype=torch.bool)


def test_capped_attention_is_the_formula():
    """Written out head by head: softmax(cap * tanh(scale * q k / cap)) v."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, rows, 8, generator=generator) * 3
        for heads, rows in ((4, 3), (2, 16), (2, 16))
    )
    mask = torch.rand(1, 1, 3, 16, generator=generator) < 0.5
    found = capped_attention(query, key, value, mask, 0.3, 5.0)
    for head in range(4):
        scores = 0.3 * query[0, head] @ key[0, head // 2].T
        assert scores.abs().max() > 5  # the cap matters
        scores = (5.0 * torch.tanh(scores / 5.0)).masked_fill(~mask[0, 0], -torch.inf)
        wanted = scores.softmax(-1) @ value[0, head // 2]
        torch.testing.assert_close(found[0, head], wanted, atol=1e-5, rtol=0)


def test_a_sink_is_a_column_without_a_value_for_every_row():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, rows, 8, generator=generator)
        for heads, rows in ((4, 3), (2, 16), (2, 16))
    )
    sinks, mask = torch.tensor([-1.0, 0.0, 1.0, 5.0]), torch.rand(1, 1, 3, 16) < 0.5
    mask[..., :1] = torch.tensor([True, False, True])[:, None]  # whatever the first column is
    found = capped_attention(query, key, value, mask, 0.3, None, sinks)
    for head in range(4):
        scores = 0.3 * query[0, head] @ key[0, head // 2].T
        scores = scores.masked_fill(~mask[0, 0], -torch.inf)
        with_sink = torch.cat([scores, sinks[head].expand(3, 1)], dim=1)
        wanted = with_sink.softmax(-1)[:, :-1] @ value[0, head // 2]
        torch.testing.assert_close(found[0, head], wanted, atol=1e-5, rtol=0)


def test_a_row_that_sees_nothing_is_no_nan():
    nothing = torch.zeros_like(MASK)
    value = torch.ones(1, 2, 16, 8)
    assert torch.isfinite(capped_attention(QUERY, KEY, value, nothing, 1.0, 5.0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_additive_mask_hides_and_stays_finite(dtype):
    mask = torch.tensor([[[[True, False]]]])
    added = additive_mask(mask, dtype)
    assert added.dtype == dtype and torch.isfinite(added).all()
    assert (added + torch.tensor([1.0, 9.0], dtype=dtype)).softmax(-1).tolist() == [[[[1.0, 0.0]]]]


def with_computed_dims(op_type: str, source: tuple, result: tuple) -> ir.Model:
    """A graph of one node that reshapes or expands to computed dimensions."""
    values = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        for name, shape, dtype in (
            ("x", source, ir.DataType.FLOAT),
            ("dims", (len(result),), ir.DataType.INT64),
        )
    ]
    node = ir.Node("", op_type, values)
    node.outputs[0].shape = ir.Shape(result)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 24}, name="one")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("source", "result", "dims"),
    [
        ((1, 2, "2*S", "C"), (1, 4, "S", "C"), [1, 4, -1, 0]),
        ((1, 4, "S", 8), (1, 2, "2*S", 8), [1, 2, -1, 8]),
        ((1, "S", 32), (1, "S", 4, 8), [1, 0, 4, 8]),
        (("S", "C"), ("C", "S"), None),
        ((1, None, None), (1, None, None), None),  # of which nothing is known
    ],
)
def test_reshapes_take_constant_dimensions_where_they_can(source, result, dims):
    model = with_computed_dims("Reshape", source, result)
    assert fix_reshapes(model) == (dims is not None)
    assert constant_dims_of("Reshape", model) == dims


def constant_dims_of(op_type: str, model: ir.Model) -> list[int] | None:
    [node] = [node for node in model.graph if node.op_type == op_type]
    constant = ir.convenience.get_const_tensor(node.inputs[1])
    return None if constant is None else constant.numpy().tolist()


@pytest.mark.parametrize(
    ("source", "result", "dims"),
    [
        ((1, "S", 2, 1, 8), (1, "S", 2, 4, 8), [1, 1, 2, 4, 8]),  # key heads, one for each query
        (("R", 1), ("R", 300), [1, 300]),
        ((8,), (2, 4, 8), [2, 4, 8]),
        ((1, 4, 1, 1), (1, 4, "S", 1), None),
        ((8,), ("R", 8), None),
        ((1, None), (1, None), None),  # of which nothing is known
    ],
)
def test_expansions_take_constant_dimensions_where_they_can(source, result, dims):
    model = with_computed_dims("Expand", source, result)
    assert fix_expansions(model) == (dims is not None)
    assert constant_dims_of("Expand", model) == dims


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "falcon-new"])
def test_no_shape_is_computed_in_a_capped_graph(captures, family, tmp_path):
    """Shape arithmetic runs on the CPU, which an engine on a GPU refuses."""
    options = ExportConfig(target="", draft="", output=tmp_path)
    folder = write_family_checkpoint(family, tmp_path / "checkpoint")
    checkpoint = open_checkpoint("target", folder, options)
    export_model(checkpoint, tmp_path, options, lambda _: None, captures)
    graph = ir.load(tmp_path / "target" / "model.onnx").graph
    assert {node.op_type for node in graph} & {"Shape", "Size"} == set()


def test_attention_without_a_mask():
    with pytest.raises(ExportError, match="Identity attends without a mask"):
        forest_attention(nn.Identity(), QUERY, KEY, KEY, None)


def test_a_mask_of_the_model_itself():
    with pytest.raises(ExportError, match="builds a mask of its own"):
        refuse_own_mask(batch_size=1)


FOREIGN = [
    {},
    {"is_causal": True},
    {"attn_mask": MASK.float()},
    {"attn_mask": MASK, "dropout_p": 0.1},
]


@pytest.mark.parametrize("arguments", FOREIGN)
def test_a_call_of_torch_with_another_mask(arguments):
    with ReplaceTorchFunctions(), pytest.raises(ExportError, match="another mask"):
        F.scaled_dot_product_attention(QUERY, KEY, KEY, **arguments)
