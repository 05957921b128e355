"""CUDA's form of a graph: the same logits from fewer kernels, on the CPU provider."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.pipeline import export_model
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import Exported, export
from tests.runtime.model_calls import logits_of, prefix_and_tree

FUSED_NORM = "SkipSimplifiedLayerNormalization"


@pytest.fixture(scope="module")
def for_cuda(exported, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("cuda") / "bundle"
    return export(replace(exported.config, output=output, form="cuda"), captures)


def operators(exported: Exported, role: str) -> Counter[str]:
    return Counter(node.op_type for node in exported.graph(role).node)


@pytest.mark.parametrize(("role", "num_layers"), [("target", 2), ("draft", 1)])
def test_a_layer_has_fewer_nodes(for_cuda, exported, role, num_layers):
    """The first norm has no sum before it; a layer ends in two, the last one before the head."""
    found, before = operators(for_cuda, role), operators(exported, role)
    assert (found[FUSED_NORM], found["RMSNormalization"]) == (2 * num_layers, 1)
    assert before["Add"] == 2 * num_layers and found["Add"] == 0
    assert found["Transpose"] == before["Transpose"] == 4 * num_layers  # heads, there and back
    assert found["Split"] == before["Split"] and found["Where"] == 1
    assert f"{role}: {2 * num_layers} norms take their sums, 1 masks are added" in for_cuda.report


def test_layers_share_the_numbers_of_a_mask(for_cuda):
    nodes = for_cuda.graph("target").node
    [added] = [node.output[0] for node in nodes if node.op_type == "Where"]
    assert [node.input[3] for node in nodes if node.op_type == "Attention"] == [added, added]


def test_logits_are_those_of_the_portable_form(for_cuda, exported):
    """A prefix, then a tree of five nodes."""
    prefix, tree = prefix_and_tree()
    for role in ("target", "draft"):
        found = []
        for bundle in (exported, for_cuda):
            with load_causal_lm(open_bundle(bundle.config.output), role) as model:
                found.append(np.concatenate([logits_of(model, *prefix), logits_of(model, *tree)]))
        np.testing.assert_allclose(found[1], found[0], atol=2e-5)
        assert np.ptp(found[0]) > 0.1


def test_the_contract_is_kept(for_cuda, exported):
    for role in ("target", "draft"):
        assert for_cuda.graph(role).input == exported.graph(role).input
        assert for_cuda.graph(role).output == exported.graph(role).output


CASES = [  # (family, options, operators of which some stay)
    # Heads are normed between the split and the transposition.
    ("qwen3", {"dtype": "fp16"}, {FUSED_NORM: 4, "RMSNormalization": 5, "Split": 4}),
    # Norms in fp32 between casts, and one after attention and MLP: no sum before it.
    ("gemma2", {"dtype": "fp16"}, {FUSED_NORM: 0, "RMSNormalization": 9}),
    ("llama", {"quantize": "int4", "dtype": "fp16"}, {FUSED_NORM: 4, "MatMulNBits": 9}),
    ("llama", {"attention": "grouped"}, {FUSED_NORM: 4, "Where": 1, "Tile": 1}),
    ("gpt2", {}, {FUSED_NORM: 0}),
]


@pytest.mark.parametrize(("family", "options", "wanted"), CASES)
def test_families_and_precisions_pass_the_gate(family, options, wanted, captures, tmp_path):
    config = ExportConfig(target="", draft="", output=tmp_path, form="cuda", **options)
    folder = write_family_checkpoint(family, tmp_path / "checkpoint")
    checkpoint = open_checkpoint("target", folder, config)
    export_model(checkpoint, tmp_path, config, lambda _: None, captures)
    graph = onnx.load(tmp_path / "target" / "model.onnx", load_external_data=False).graph
    found = Counter(node.op_type for node in graph.node)
    assert {op_type: found[op_type] for op_type in wanted} == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "tensorrt"}, "form='cuda' has operators of ONNX Runtime"),
        ({"attention": "exact"}, "form='cuda' is for a GPU"),
        ({"quantize": "int8-dynamic"}, "form='cuda' is for a GPU"),
    ],
)
def test_what_has_no_such_form(options, said, tmp_path):
    with pytest.raises(ExportError, match=said):
        ExportConfig(target="t", output=tmp_path, form="cuda", **options)


def test_an_unknown_form(tmp_path):
    with pytest.raises(ExportError, match="form='rocm' is not known; use one of portable, cuda"):
        ExportConfig(target="t", output=tmp_path, form="rocm")
