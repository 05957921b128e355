"""Parts of an engine: the order of their tensors, and a kind of state that only a test has."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from dsbd_export.capture.forest_graph import (
    NODES,
    Example,
    ExportContract,
    ExportPart,
    ForestGraph,
    captured_graph,
    joined,
)
from dsbd_export.capture.graph_checks import check_contract
from dsbd_export.capture.replacements import prepare_for_capture
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.model_source import ModelSource, parts_of_engine
from dsbd_export.opening import open_checkpoint
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import silent
from dsbd_runtime.parts.cache_entries import AttentionRows, ConvolutionRows

ATTENDING = AttentionRows(layer=1, num_heads=2, key_width=8, value_width=8, dtype="fp32")
CONVOLUTION = ConvolutionRows(layer=0, width=6, num_ancestors=2, dtype="fp32")
LEADING = ["input_ids", "position_ids", "attention_mask", "write_indices", "logit_rows"]


class Depths(ExportPart):
    """A number of each node is an input; twice the number is an output."""

    def contract(self):
        return ExportContract(inputs={"depths": Example((NODES,))}, outputs=("doubled",))

    def hook(self, model, graph):
        def doubled(call):
            call.outputs["doubled"] = lambda: call.inputs["depths"] * 2
            return nullcontext()

        return doubled


@pytest.fixture
def checkpoint(small_llama_folder):
    return open_checkpoint("target", small_llama_folder, ModelOptions())


def test_caches_are_in_the_order_of_layers_after_what_every_engine_has(checkpoint):
    mixed = replace(checkpoint, caches=(CONVOLUTION, ATTENDING), feature_layers=(0,))
    contract = joined(parts_of_engine(mixed, ModelOptions()))
    rows = ["0.convolution", "1.key", "1.value"]
    past = [f"past_key_values.{each}" for each in rows]
    of_some = ["recent_write_indices", "ancestors", "feature_rows"]
    assert list(contract.inputs) == [*LEADING, *past, *of_some]
    assert contract.outputs == ("logits", *(f"present.{each}" for each in rows), "features")
    assert [space.rows.name for space in contract.spaces] == ["C", "M"]


def test_a_kind_of_state_is_one_class(checkpoint):
    """Nothing else of the capture or of the checks has to be told of it."""
    source = ModelSource(checkpoint)
    model = load_model(checkpoint)
    source.probed(model, "fp32")
    form = prepare_for_capture(model)
    module = ForestGraph(model, [*source.parts(ModelOptions()), Depths(checkpoint)], form)
    graph = captured_graph(module, checkpoint, module.contract, silent)
    optimize_graph(graph)
    check_contract(graph, module.contract, form)
    assert graph.graph.inputs[-1].name == "depths"
    assert graph.graph.outputs[-1].name == "doubled"
