"""Graphs that break the contract are named; parts of an engine, and a kind of state of a test."""

from contextlib import nullcontext
from dataclasses import replace

import onnx
import onnx_ir as ir
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
from dsbd_export.capture.graph_checks import check_contract, lint_for_tensorrt
from dsbd_export.capture.replacements import prepare_for_capture
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.model_source import ModelSource
from dsbd_export.opening import open_checkpoint
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import silent
from dsbd_runtime.parts.attention.cache_entries import AttentionRows, ConvolutionRows
from tests.export.gate import exported_target


@pytest.fixture
def model(exported):
    return ir.load(exported.config.output / "target" / "model.onnx")


def contract_of(exported):
    target = exported_target(exported.config, exported.config.output)
    return joined(ModelSource(target).parts(exported.config))


@pytest.fixture
def contract(exported):
    return contract_of(exported)


def node_of(model, op_type):
    return next(node for node in model.graph if node.op_type == op_type)


def return_a_cache_as_it_came_in(model):
    model.graph.outputs[1] = model.graph.inputs[5]
    model.graph.outputs[1].name = "present.0.key"
    model.graph.inputs[5] = ir.Value(name="past_key_values.0.key")


BROKEN = [
    (lambda model: setattr(model.graph.inputs[0], "name", "tokens"), "its inputs are .*'tokens'"),
    (
        lambda model: model.graph.outputs.reverse(),
        "its outputs are .*expected .*'logits', 'present.0.key'",
    ),
    (
        lambda model: setattr(node_of(model, "Gemm"), "domain", "com.microsoft"),
        "operators .*com.microsoft::Gemm",
    ),
    (
        lambda model: model.opset_imports.update({"com.microsoft": 1}),
        "its operator sets are .*com.microsoft",
    ),
    (
        lambda model: node_of(model, "TensorScatter").replace_input_with(0, model.graph.inputs[6]),
        "present.0.key is written from past_key_values.0.value",
    ),
    (return_a_cache_as_it_came_in, "present.0.key is the output of None, expected a TensorScatter"),
    (
        lambda model: node_of(model, "Attention").replace_input_with(3, None),
        "attend with .*None: 1.* expected .*'attention_mask': 2",
    ),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN)
def test_a_broken_contract_is_named(model, contract, damage, words):
    check_contract(model, contract)
    damage(model)
    with pytest.raises(ExportError, match=words):
        check_contract(model, contract)


def test_a_layer_with_the_wrong_mask_is_named(exported_others):
    contract = contract_of(exported_others)
    model = ir.load(exported_others.config.output / "target" / "model.onnx")
    node_of(model, "Attention").replace_input_with(3, model.graph.inputs[3])
    with pytest.raises(ExportError, match=r"attend with .*'attention_mask_sliding': 2"):
        check_contract(model, contract)


def test_layers_may_attend_in_other_forms(model, contract):
    """Attention with sinks is products, that of other layers of the model a node."""
    check_contract(model, contract, AttentionForm.CAPPED)
    with pytest.raises(ExportError, match=r"attend with {}, expected {'attention_mask'"):
        check_contract(model, contract, AttentionForm.OWN)


def test_every_layer_may_attend_twice_or_none(model, contract):
    """As to the two halves of its values."""
    first, second = (node for node in model.graph if node.op_type == "Attention")

    def attend_again(node):
        node.graph.insert_after(
            node, ir.Node("", "Attention", node.inputs, node.attributes.values())
        )

    attend_again(first)
    with pytest.raises(ExportError, match=r"attend with {'attention_mask': 3}, expected"):
        check_contract(model, contract)
    attend_again(second)
    check_contract(model, contract)


RIGHT = """
<ir_version: 10, opset_import: ["": 24, "other": 1]>
forest (float16[1,2,S,8] q, float16[1,2,S,8] new, bool[1,1,S,C] mask, int64[1] at,
        float16[1,2,C,8] past) => (float[1,2,S,8] out, float16[1,2,C,8] present)
<float16[1,2,S,8] y>
{
    present = TensorScatter <axis = 2, mode = "linear"> (past, new, at)
    y = Attention <is_causal = 0> (q, present, present, mask)
    out = Cast <to = 1> (y)
}
"""
FINDINGS = [  # (what is replaced by what, words of the finding)
    ({'"": 24': '"": 26'}, "opset 26, expected at most 25"),
    ({"out = Cast": "other_y = other.Copy(y)\n out = Cast"}, "operator other::Copy"),
    ({"axis = 2": "axis = 1"}, "axis 1, expected 2"),
    ({'mode = "linear"': 'mode = "circular"'}, "mode circular, expected linear"),
    ({"float16[1,2,C,8] past)": "float16[2,C,8] past)"}, "expected 4 axes"),
    ({"is_causal = 0": "is_causal = 1"}, "is_causal 1, expected 0"),
    ({"is_causal = 0": "softcap = 30.0"}, "softcap 30, expected none"),
    ({"present, mask)": "present, mask, past, past)"}, "2 findings"),
    ({"present, mask)": "present, mask, , , at)"}, "input nonpad_kv_seqlen, expected none"),
    ({"y = Attention": "y, k, v = Attention"}, "3 outputs, expected one"),
    ({"bool[1,1,S,C] mask": "float[1,1,S,C] mask"}, "Attention to y mixes FLOAT and FLOAT16"),
    (
        {
            "past) =>": "past, float16[1,2,C,8] old) =>",
            "(past, new": "(copy, new",
            "{\n    present": "{\n    copy = Identity(old)\n    present",
            "<float16[1,2,S,8] y>": "<float16[1,2,S,8] y, float16[1,2,C,8] copy>",
        },
        "updates copy, expected a graph input",
    ),
    (
        {
            "present = ": "updated = ",
            "q, present, present": "q, updated, updated",
            "out = ": "present = Identity(updated)\n out = ",
        },
        "TensorScatter to updated makes no graph output",
    ),
]


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


@pytest.mark.parametrize(("changes", "words"), FINDINGS)
def test_a_broken_graph(changes, words):
    text = RIGHT
    assert lint_for_tensorrt(model_of(text)) == []
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    findings = lint_for_tensorrt(model_of(text))
    assert words in f"{len(findings)} findings: {findings}"
    assert len(findings) == 1 or words == "2 findings"


def test_exported_graphs_are_right(exported, exported_others):
    for bundle in (exported, exported_others):
        for role in ("target", "draft"):
            assert lint_for_tensorrt(ir.from_proto(bundle.model(role))) == []


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
    contract = joined(ModelSource(mixed).parts(ModelOptions()))
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
