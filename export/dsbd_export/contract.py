"""Check that a graph is what ``dsbd_runtime.graph`` promises, before a byte of it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.families import AttentionForm
from dsbd_export.forest_graph import input_names, output_names
from dsbd_export.forest_hooks import OPSET
from dsbd_runtime.graph import CACHE_PARTS, WRITE_INDICES, past_name, present_name


def check_contract(
    model: ir.Model, checkpoint: Checkpoint, form: AttentionForm = AttentionForm.NODE
) -> None:
    """Raise when names, operators, caches or masks of the graph are not those of the contract."""
    _check_names("inputs", model.graph.inputs, input_names(checkpoint))
    _check_names("outputs", model.graph.outputs, output_names(checkpoint))
    _check_operators(model)
    _check_caches(model.graph, checkpoint)
    _check_masks(model.graph, checkpoint, form)


def _check_names(kind: str, values: Sequence[ir.Value], wanted: list[str]) -> None:
    found = [value.name for value in values]
    if found != wanted:
        raise _broken(f"its {kind} are {found}, expected {wanted}")


def _check_operators(model: ir.Model) -> None:
    if model.opset_imports != {"": OPSET}:
        raise _broken(f"its operator sets are {model.opset_imports}, expected only ai.onnx {OPSET}")
    if model.functions:
        raise _broken(f"it has local functions {sorted(map(str, model.functions))}, expected none")
    foreign = {f"{node.domain}::{node.op_type}" for node in model.graph if node.domain}
    if foreign:
        raise _broken(f"it has operators {sorted(foreign)}, expected only ai.onnx")


def _check_caches(graph: ir.Graph, checkpoint: Checkpoint) -> None:
    """Every cache must go from its input through one scatter to its output."""
    outputs = {output.name: output for output in graph.outputs}
    for layer in range(checkpoint.kv.num_layers):
        for part in CACHE_PARTS:
            scatter = outputs[present_name(layer, part)].producer()
            if scatter is None or scatter.op_type != "TensorScatter":
                raise _broken(f"{present_name(layer, part)} comes from {scatter}, no TensorScatter")
            past, _, index = (value.name if value else None for value in scatter.inputs)
            if (past, index) != (past_name(layer, part), WRITE_INDICES):
                raise _broken(f"{present_name(layer, part)} is written from {past} at {index}")


def _check_masks(graph: ir.Graph, checkpoint: Checkpoint, form: AttentionForm) -> None:
    """Every layer must attend once, with the mask that its config asks for.

    A model that attends by its own arithmetic shows no layers to count: that it reads its masks
    at all is checked here, all else by the parity gate.
    """
    wanted = Counter(checkpoint.layer_masks)
    if form is AttentionForm.NODE:
        found = Counter(_input_name(node, 3) for node in graph if node.op_type == "Attention")
    else:
        chosen_by = (_input_name(node, 0) for node in graph if node.op_type == "Where")
        found = Counter(name for name in chosen_by if name in wanted)
    if form is AttentionForm.OWN:
        wanted = Counter(set(wanted))
    if found != wanted:
        raise _broken(f"its layers attend with {dict(found)}, expected {dict(wanted)}")


def _input_name(node: ir.Node, index: int) -> str | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return value.name if value else None


def _broken(what: str) -> ExportError:
    return ExportError(
        f"the graph breaks the contract: {what}; the family is not supported by this version"
    )
