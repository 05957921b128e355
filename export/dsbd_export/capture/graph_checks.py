"""Checks of a captured graph before it is written: its contract, and whether TensorRT builds it."""

from collections import Counter
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from dsbd_export.capture.forest_graph import ExportContract
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.config import OPSET
from dsbd_export.errors import ExportError
from dsbd_runtime.parts.attention.cache_entries import past_name, present_name

MAX_OPSET = 25
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_CHANGES_TYPE = ("Cast", "CastLike")
_PAST_INPUTS = {4: "past_key", 5: "past_value", 6: "nonpad_kv_seqlen"}


def check_contract(
    model: ir.Model, contract: ExportContract, form: AttentionForm | None = AttentionForm.NODE
) -> None:
    """Raise ExportError unless names, operators, caches and masks follow the contract.

    form: None skips the check of masks.
    """
    _check_names("inputs", model.graph.inputs, list(contract.inputs))
    _check_names("outputs", model.graph.outputs, list(contract.outputs))
    _check_operators(model)
    _check_caches(model.graph, contract)
    if form is not None:
        _check_masks(model.graph, contract.attended, form)


def _check_names(kind: str, values: Sequence[ir.Value], wanted: list[str]) -> None:
    names = [value.name for value in values]
    if names != wanted:
        raise _broken(f"its {kind} are {names}, expected {wanted}")


def _check_operators(model: ir.Model) -> None:
    if model.opset_imports != {"": OPSET}:
        raise _broken(f"its operator sets are {model.opset_imports}, expected only ai.onnx {OPSET}")
    if model.functions:
        raise _broken(f"it has local functions {sorted(map(str, model.functions))}, expected none")
    foreign = {f"{node.domain}::{node.op_type}" for node in model.graph if node.domain}
    if foreign:
        raise _broken(f"it has operators {sorted(foreign)}, expected only ai.onnx")


def _check_caches(graph: ir.Graph, contract: ExportContract) -> None:
    """Raise ExportError unless one scatter leads from each cache's input to its output."""
    outputs = {output.name: output for output in graph.outputs}
    for cache, part, space in contract.tensors:
        present = present_name(cache.layer, part)
        scatter = outputs[present].producer()
        if scatter is None or scatter.op_type != "TensorScatter":
            raise _broken(f"{present} is the output of {scatter}, expected a TensorScatter")
        past, _, index = (value.name if value else None for value in scatter.inputs)
        if (past, index) != (past_name(cache.layer, part), space.write_indices):
            raise _broken(f"{present} is written from {past} at {index}")


def _check_masks(graph: ir.Graph, attended: Sequence[str], form: AttentionForm) -> None:
    """Raise ExportError unless every layer attends with its config's mask, equally often."""
    wanted = Counter(attended)
    counts: Counter[str | None] = Counter()
    if form is not AttentionForm.OWN:  # in the capped form, layers without sinks are nodes too
        counts.update(
            _input_name(node, 3)
            for node in graph
            if node.op_type == "Attention"
            and (key := node.inputs[1]) is not None
            and not key.is_graph_input()  # rows of a source have no mask
        )
    if form is not AttentionForm.NODE:
        chosen_by = (_input_name(node, 0) for node in graph if node.op_type == "Where")
        counts.update(name for name in chosen_by if name in wanted)
    if form is AttentionForm.OWN:
        wanted = Counter(set(wanted))
    elif wanted and (times := counts.total() // wanted.total()):
        wanted = Counter({name: times * num for name, num in wanted.items()})
    if counts != wanted:
        raise _broken(f"its layers attend with {dict(counts)}, expected {dict(wanted)}")


def _input_name(node: ir.Node, index: int) -> str | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return value.name if value else None


def _broken(problem: str) -> ExportError:
    return ExportError(
        f"the graph breaks the contract: {problem}; the family is not supported by this version"
    )


def check_for_tensorrt(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Raise when TensorRT would not build the graph of this checkpoint."""
    if findings := lint_for_tensorrt(model):
        raise ExportError(
            f"the graph of the {checkpoint.role} (family {checkpoint.family}) cannot become a "
            f"TensorRT engine: {findings[0]} ({len(findings)} findings); export it with dtype=fp32"
        )


def lint_for_tensorrt(model: ir.Model) -> list[str]:
    """Return the findings, one line each; none when TensorRT should be able to build it."""
    findings = list(_lint_operators(model))
    for node in model.graph:
        if node.op_type == "TensorScatter":
            findings += _lint_scatter(node)
        elif node.op_type == "Attention":
            findings += _lint_attention(node)
        findings += _lint_types(node)
    return findings


def _lint_operators(model: ir.Model) -> Iterator[str]:
    opset = model.opset_imports.get("")
    if opset is None or opset > MAX_OPSET:
        yield f"opset {opset}, expected at most {MAX_OPSET}"
    if model.functions:
        yield f"local functions {sorted(map(str, model.functions))}, expected none"
    for domain, op_type in sorted({(n.domain, n.op_type) for n in model.graph if n.domain}):
        yield f"operator {domain}::{op_type}, expected only ai.onnx"


def _lint_scatter(node: ir.Node) -> Iterator[str]:
    past, present = node.inputs[0], node.outputs[0]
    name = f"TensorScatter to {present.name}"
    if past is None or not past.is_graph_input():
        yield f"{name} updates {past.name if past else None}, expected a graph input"
    if not present.is_graph_output():
        yield f"{name} makes no graph output"
    if past is None or past.shape is None or len(past.shape) != 4:
        yield f"{name} updates a cache of shape {past.shape if past else None}, expected 4 axes"
    if (axis := node.attributes.get_int("axis", -2)) not in (2, -2):
        yield f"{name} has axis {axis}, expected 2"
    if (mode := node.attributes.get_string("mode", "linear")) != "linear":
        yield f"{name} has mode {mode}, expected linear"


def _lint_attention(node: ir.Node) -> Iterator[str]:
    name = f"Attention to {node.outputs[0].name}"
    if sum(bool(output.name or output.uses()) for output in node.outputs) != 1:
        yield f"{name} has {len(node.outputs)} outputs, expected one"
    for index, input_name in _PAST_INPUTS.items():
        if index < len(node.inputs) and node.inputs[index] is not None:
            yield f"{name} has the input {input_name}, expected none"
    if is_causal := node.attributes.get_int("is_causal", 0):
        yield f"{name} has is_causal {is_causal}, expected 0: the mask is complete"
    if softcap := node.attributes.get_float("softcap", 0.0):
        yield f"{name} has softcap {softcap:g}, expected none: write it as MatMul and Tanh"


def _lint_types(node: ir.Node) -> Iterator[str]:
    """Check for mixed float types, which need an explicit Cast: TensorRT is strongly typed."""
    if node.op_type in _CHANGES_TYPE:
        return
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    types = sorted({value.dtype.name for value in values if value.dtype in _FLOATS and value.dtype})
    if len(types) > 1:
        yield (
            f"{node.op_type} to {node.outputs[0].name} mixes {' and '.join(types)}, "
            "expected one type or explicit casts"
        )
