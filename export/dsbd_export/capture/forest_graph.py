"""The forest graph: a checkpoint captured as one ONNX graph, as its parts say (see ``part``)."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from dsbd_export.capture.forest_cache import ForestCache
from dsbd_export.capture.part import CapturedCall, Example, ExportContract, ExportPart, joined
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.config import OPSET
from dsbd_export.errors import ExportError, own_error_in, reason_of
from dsbd_export.passes.optimize import fuse_norms
from dsbd_export.progress import Counter, PrintedSteps, Report, to_stdout
from dsbd_runtime.parts.attention_rows import INPUT_IDS, POSITION_IDS
from dsbd_runtime.parts.cache_entries import past_name, present_name

# How much of a capture has passed when torch.onnx.export prints a step, and when its own part ends:
# of 24 layers, 30 s.
_SHARE_BY_STEP = {"Run decompositions...": 0.29, "Translate the graph into ONNX...": 0.77}
_SHARE_BEFORE_OPTIMIZING = 0.83


class ForestGraph(nn.Module):
    """The module that is captured: the model, with the inputs and outputs of its parts."""

    PLACE = "model"  # with which the names of weights begin

    def __init__(
        self, model: nn.Module, parts: Sequence[ExportPart], form: AttentionForm | None
    ) -> None:
        super().__init__()
        self.add_module(self.PLACE, model)
        self.form = form  # None where masks are parts of biases
        self.contract = joined(parts)
        self._cache_name = cache_name(model)
        self._hooks = [part.hook(model, self) for part in parts]

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        inputs = dict(zip(self.contract.inputs, tensors, strict=True))
        cache = _cache(self.contract, inputs)
        arguments: dict[str, Any] = {
            "input_ids": inputs[INPUT_IDS],
            "position_ids": inputs[POSITION_IDS],
            "use_cache": True,
            self._cache_name: cache,
        }
        call = CapturedCall(self.form, inputs, cache, arguments)
        with contextlib.ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(hook(call))
            call.logits = self.computed(call)
        names = (present_name(entry.layer, part) for entry, part, _ in self.contract.tensors)
        present = dict(zip(names, (row for rows in cache.present() for row in rows), strict=True))
        found = {name: output() for name, output in call.outputs.items()} | present
        return [found[name] for name in self.contract.outputs]

    def computed(self, call: CapturedCall) -> Tensor:
        """Return the logits (R, V) of a prepared call."""
        model: Any = self.model
        logits: Tensor = model(**call.arguments).logits.squeeze(0)
        return logits


def _cache(contract: ExportContract, inputs: Mapping[str, Tensor]) -> ForestCache:
    past = {
        (entry.layer, entry.kind): tuple(inputs[past_name(entry.layer, p)] for p in entry.parts)
        for entry, _ in contract.caches
    }
    kinds = {entry.kind: inputs[space.write_indices] for entry, space in contract.caches}
    return ForestCache(past, kinds)


def captured_graph(
    module: nn.Module,
    checkpoint: Checkpoint,
    contract: ExportContract,
    report: Report,
    phase: str = "capturing the graph",
) -> ir.Model:
    """Return the graph of a module over lists of tensors; raise ExportError if it has none."""
    phase = f"{checkpoint.role}: {phase}"
    report(phase)
    counter = Counter(phase, "", to_stdout(report, sys.stdout))
    steps = PrintedSteps(_SHARE_BY_STEP, counter)
    examples = list(contract.inputs.values())
    with quiet_libraries(), torch.no_grad(), contextlib.redirect_stdout(steps):
        try:
            program = torch.onnx.export(
                module.eval(),
                ([example.tensor for example in examples],),
                input_names=list(contract.inputs),
                output_names=list(contract.outputs),
                dynamic_shapes=(_dynamic_shapes(examples),),
                opset_version=OPSET,
                dynamo=True,
                verbose=True,  # prints its steps
                optimize=False,
            )
        except Exception as error:
            reason = own_error_in(error) or reason_of(error)
            raise ExportError(
                f"the {checkpoint.role} (family {checkpoint.family}) cannot be captured: {reason}"
            ) from error
    if program is None:
        raise ExportError(f"torch.onnx.export gave no graph for family {checkpoint.family}")
    # The optimizer drops the addition of anything up to 1e-8 as that of zero, and with it the
    # epsilon of some norms: they are single nodes before.
    fuse_norms(program.model)
    counter.passed(_SHARE_BEFORE_OPTIMIZING)
    program.optimize()
    return program.model


def _dynamic_shapes(examples: Sequence[Example]) -> list[dict[int, Any] | None]:
    """Return the dynamic axes of each input; one axis of a name for all."""
    dims = {axis: axis.dim for example in examples for axis in example.axes.values()}
    return [
        {place: dims[axis] for place, axis in example.axes.items()} or None for example in examples
    ]
