"""Assignments to parts of a tensor in a captured graph: what is left of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.config import OPSET
from dsbd_export.passes.optimize import optimize_graph
from tests.ort_sessions import cpu_session

WIDTH = 7


class Assigned(nn.Module):
    """Two tensors assigned to places of a third one, twice, as layers do."""

    def __init__(self, places: tuple[slice, slice]) -> None:
        super().__init__()
        self.places = places

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.assigned(a, b), self.assigned(a + 1, b)

    def assigned(self, a: Tensor, b: Tensor) -> Tensor:
        x = a.new_zeros(*a.shape[:-1], WIDTH)
        for place, part in zip(self.places, (a, b), strict=True):
            x[..., place] = part
        return x


def captured(places: tuple[slice, slice]) -> tuple[ir.Model, list[Tensor], nn.Module]:
    """The optimized graph of tensors of three dimensions, some rows in the middle."""
    widths = [len(range(WIDTH)[place]) for place in places]
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
        ((slice(0, 3), slice(3, WIDTH)), 2),  # latent attention: a head's part without positions
        ((slice(3, WIDTH), slice(0, 3)), 0),  # in the other order
        ((slice(0, 3), slice(2, WIDTH)), 0),  # one over the other
        ((slice(0, 3), slice(4, WIDTH)), 0),  # a place is left
        ((slice(1, WIDTH, 3), slice(2, WIDTH, 3)), 0),  # positions of three axes, interleaved
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
