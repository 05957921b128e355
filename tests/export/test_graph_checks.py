"""Graphs that break the contract are named before they are written."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from dsbd_export.capture.forest_graph import joined
from dsbd_export.capture.graph_checks import check_contract
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.errors import ExportError
from dsbd_export.model_source import parts_of_engine
from tests.export.exported_target import exported_target


def contract_of(exported):
    target = exported_target(exported.config, exported.config.output)
    return joined(parts_of_engine(target, exported.config))


def node_of(model, op_type):
    return next(node for node in model.graph if node.op_type == op_type)


def rename_an_input(model):
    model.graph.inputs[0].name = "tokens"


def reverse_the_outputs(model):
    model.graph.outputs.reverse()


def take_a_foreign_operator(model):
    node_of(model, "Gemm").domain = "com.microsoft"


def import_a_foreign_domain(model):
    model.opset_imports["com.microsoft"] = 1


def scatter_into_another_cache(model):
    node_of(model, "TensorScatter").replace_input_with(0, model.graph.inputs[6])


def return_a_cache_as_it_came_in(model):
    model.graph.outputs[1] = model.graph.inputs[5]
    model.graph.outputs[1].name = "present.0.key"
    model.graph.inputs[5] = ir.Value(name="past_key_values.0.key")


def attend_without_mask(model):
    node_of(model, "Attention").replace_input_with(3, None)


BROKEN = [
    (rename_an_input, "its inputs are .*'tokens'"),
    (reverse_the_outputs, "its outputs are .*expected .*'logits', 'present.0.key'"),
    (take_a_foreign_operator, "operators .*com.microsoft::Gemm"),
    (import_a_foreign_domain, "its operator sets are .*com.microsoft"),
    (scatter_into_another_cache, "present.0.key is written from past_key_values.0.value"),
    (return_a_cache_as_it_came_in, "present.0.key is the output of None, expected a TensorScatter"),
    (attend_without_mask, "attend with .*None: 1.* expected .*'attention_mask': 2"),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN)
def test_a_broken_contract_is_named(exported, damage, words):
    contract = contract_of(exported)
    model = ir.load(exported.config.output / "target" / "model.onnx")
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


def test_layers_may_attend_in_two_forms(exported):
    """Attention with sinks is products, that of other layers of the model a node."""
    contract = contract_of(exported)
    model = ir.load(exported.config.output / "target" / "model.onnx")
    check_contract(model, contract, AttentionForm.CAPPED)


def test_attention_of_another_form_is_not_counted(exported):
    contract = contract_of(exported)
    model = ir.load(exported.config.output / "target" / "model.onnx")
    with pytest.raises(ExportError, match=r"attend with {}, expected {'attention_mask'"):
        check_contract(model, contract, AttentionForm.OWN)


def attend_again(node):
    """Let a layer attend twice, as to the two halves of its values."""
    again = ir.Node("", "Attention", node.inputs, node.attributes.values())
    node.graph.insert_after(node, again)


def test_every_layer_may_attend_twice_or_none(exported):
    contract = contract_of(exported)
    model = ir.load(exported.config.output / "target" / "model.onnx")
    first, second = (node for node in model.graph if node.op_type == "Attention")
    attend_again(first)
    with pytest.raises(ExportError, match=r"attend with {'attention_mask': 3}, expected"):
        check_contract(model, contract)
    attend_again(second)
    check_contract(model, contract)
