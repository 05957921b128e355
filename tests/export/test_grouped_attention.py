"""Grouped attention: the same logits from nodes over key heads, and what is left as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from dsbd_export.capture.graph_checks import lint_for_tensorrt
from dsbd_export.config import HIDDEN, ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.passes.optimize import group_query_heads
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from tests.export.conftest import export
from tests.runtime.model_calls import logits_of, prefix_and_tree

MASKS = {
    "target": ["attention_mask", "attention_mask_sliding"],
    "draft": ["attention_mask_sliding"],
}


@pytest.fixture(scope="module")
def grouped(exported_others, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("grouped") / "bundle"
    return export(replace(exported_others.config, output=output, attention="grouped"), captures)


def test_every_node_attends_over_key_heads_and_layers_share_a_mask(grouped):
    for role, masks in MASKS.items():
        model = ir.load(grouped.config.output / role / "model.onnx")
        repeats = {node.outputs[0]: node for node in model.graph if node.op_type == "Tile"}
        assert sorted(str(added_mask(node)) for node in repeats.values()) == masks
        for node in model.graph:
            if node.op_type == "Attention":
                assert node.inputs[0].producer().op_type == "Reshape"
                assert node.inputs[3] in repeats
        assert not lint_for_tensorrt(model)
        assert f"{role}: {len(masks)} attention nodes grouped" in grouped.report


def added_mask(repeat: ir.Node) -> str | None:
    """Return the name of the mask that a Tile repeats as numbers: CUDA has no Tile of bool."""
    added = repeat.inputs[0].producer()
    assert added.op_type == "Where"
    assert [value.const_value.numpy().item() for value in added.inputs[1:]] == [0, HIDDEN]
    return added.inputs[0].name


def test_logits_are_those_of_the_fused_export(grouped, exported_others):
    """A prefix of 11 rows, which crosses the window of 8, then a tree of five nodes."""
    prefix, tree = prefix_and_tree()
    for role in MASKS:
        found = []
        for exported in (exported_others, grouped):
            with load_causal_lm(open_bundle(exported.config.output), role) as model:
                found.append(np.concatenate([logits_of(model, *prefix), logits_of(model, *tree)]))
        np.testing.assert_allclose(found[1], found[0], atol=2e-5)
        assert np.ptp(found[0]) > 0.1


def test_the_contract_is_kept(grouped, exported_others):
    for role in MASKS:
        assert grouped.graph(role).input == exported_others.graph(role).input
        assert grouped.graph(role).output == exported_others.graph(role).output
        assert grouped.result.manifest.target.parity.max_abs_error < 5e-5


def test_heads_with_keys_of_their_own_stay():
    shapes = {"query": (1, 2, "S", 8), "key": (1, 2, "C", 8), "value": (1, 2, "C", 8)}
    values = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in {**shapes, "mask": (1, 1, "S", "C")}.items()
    ]
    node = ir.Node("", "Attention", values, attributes=[ir.AttrFloat32("scale", 0.5)])
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 24}, name="one")
    assert group_query_heads(ir.Model(graph, ir_version=10)) == 0
    assert Counter(node.op_type for node in graph) == {"Attention": 1}


def test_an_unknown_form(tmp_path):
    with pytest.raises(ExportError, match="attention='flash' is not known; use one of fused, gr"):
        ExportConfig(target="t", draft="d", output=tmp_path, attention="flash")
