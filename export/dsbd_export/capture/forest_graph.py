"""The forest graph: a checkpoint captured as one ONNX graph, defined by its parts.

A part is one kind of state of an engine. It contributes to the graph, other files and the manifest.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from dsbd_export.capture.caches import ForestCache
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.checkpoint_files import TORCH_DTYPES
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.config import OPSET, ModelOptions
from dsbd_export.errors import ExportError, own_error_in, reason_of
from dsbd_export.parity_cases import Reference
from dsbd_export.passes.optimize import fuse_norms
from dsbd_export.progress import Counter, PrintedSteps, Report, to_stdout
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.parts.attention.attention_rows import INPUT_IDS, POSITION_IDS
from dsbd_runtime.parts.attention.cache_entries import CacheEntry, past_name, present_name


@dataclass(frozen=True)
class Axis:
    """A dynamic axis of the graph, and its length in the captured example."""

    name: str
    size: int
    min_size: int = 1
    max_size: int | None = None

    @property
    def dim(self) -> Any:
        """Return the axis as a Dim of torch.export; equal names mean the same axis."""
        return torch.export.Dim(self.name, min=self.min_size, max=self.max_size)


NODES = Axis("S", 5)


@dataclass(frozen=True)
class Example:
    """Example of an input of the graph; dynamic axes have names, and lengths in this example."""

    shape: tuple[int | Axis, ...]
    dtype: torch.dtype = torch.int64

    @property
    def axes(self) -> dict[int, Axis]:
        return {place: size for place, size in enumerate(self.shape) if isinstance(size, Axis)}

    @property
    def tensor(self) -> Tensor:
        """Return zeros."""
        sizes = (size.size if isinstance(size, Axis) else size for size in self.shape)
        return torch.zeros(*sizes, dtype=self.dtype)


@dataclass(frozen=True)
class RowSpace:
    """Rows of caches that are written and moved by the same inputs."""

    rows: Axis
    write_indices: str  # name of the input with the first of the new rows
    src_rows: str  # name of the input of the prune graph with the rows to keep
    num_kept: str  # name of the axis of ``src_rows``


@dataclass(frozen=True, kw_only=True)
class ExportContract:
    """Inputs and outputs of a graph, either of one part or of all parts."""

    # an example of each input by name, in the order of the graph; caches are left out
    inputs: Mapping[str, Example] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()  # names; caches are left out
    spaces: tuple[RowSpace, ...] = ()
    caches: tuple[tuple[CacheEntry, RowSpace], ...] = ()
    attended: tuple[str, ...] = ()  # names of mask inputs, one per layer with attention
    # fields of the manifest entry with which the parity gate runs the engine
    entry: Mapping[str, Any] = field(default_factory=dict)
    is_leading: bool = False  # whether its inputs and outputs precede the caches
    inexact: str = ""  # reason why sums cannot be exact in this graph; "" if they can

    @property
    def tensors(self) -> list[tuple[CacheEntry, str, RowSpace]]:
        """Return every tensor of the caches: entry, part of its name, and space."""
        return [(entry, part, space) for entry, space in self.caches for part in entry.parts]


@dataclass
class CapturedCall:
    """The captured call of a model; parts prepare it one after the other."""

    form: AttentionForm | None
    inputs: Mapping[str, Tensor]
    cache: ForestCache
    arguments: dict[str, Any]
    logits: Tensor = field(init=False)  # (R, V), once the model has returned
    # outputs of the graph by name, computed after the model
    outputs: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


Hook = Callable[[CapturedCall], AbstractContextManager[object]]
"""Prepares a call; returns the context in which the model computes it."""


@dataclass(frozen=True)
class Made:
    """Files and references of a model that is being exported."""

    folder: Path
    # the cases of the parity gate, with the checkpoint's own results
    references: Sequence[Reference]
    options: ModelOptions
    judged: Bundle  # the bundle with which the parity gate runs the engine; no manifest file yet
    report: Report


class ExportPart:
    """One kind of state; a subclass defines only the methods that it needs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def contract(self) -> ExportContract:
        """Return the part's inputs, outputs and caches."""
        return ExportContract()

    def refer(self, model: Any, references: list[Reference]) -> list[Reference]:
        """Return the references with the unmodified model's results for this part."""
        return references

    def hook(self, model: Any, graph: Any) -> Hook:
        """Return a function that prepares a call; tensors of ``graph`` become constants."""
        return lambda _call: contextlib.nullcontext()

    def write(self, made: Made) -> None:
        """Write the graphs that the parity gate runs in addition to model.onnx."""
        return

    def complete(self, made: Made) -> dict[str, Any]:
        """Return changed fields of the manifest entry; ExportError if results differ."""
        return {}


def joined(parts: Iterable[ExportPart]) -> ExportContract:
    """Return the contract of a graph with these parts; caches are in the order of the layers."""
    contracts = [part.contract() for part in parts]
    caches = [each for contract in contracts for each in contract.caches]
    caches.sort(key=lambda each: each[0].layer)
    kept = ExportContract(caches=tuple(caches))
    ordered = [
        *(contract for contract in contracts if contract.is_leading),
        ExportContract(
            inputs={
                name: example
                for entry, space in caches
                for name, example in kept_rows(entry, past_name, space.rows).items()
            },
            outputs=tuple(present_name(entry.layer, part) for entry, part, _ in kept.tensors),
        ),
        *(contract for contract in contracts if not contract.is_leading),
    ]
    inputs = dict.fromkeys((INPUT_IDS, POSITION_IDS), Example((1, NODES)))
    for contract in ordered:
        inputs |= contract.inputs
    return ExportContract(
        inputs=inputs,
        outputs=tuple(name for contract in ordered for name in contract.outputs),
        spaces=tuple(dict.fromkeys(space for each in contracts for space in each.spaces)),
        caches=kept.caches,
        attended=tuple(mask for each in contracts for mask in each.attended),
        entry={name: value for each in contracts for name, value in each.entry.items()},
        inexact=next((each.inexact for each in contracts if each.inexact), ""),
    )


def kept_rows(
    entry: CacheEntry, name_of: Callable[[int, str], str], rows: Axis, batch: int | Axis = 1
) -> dict[str, Example]:
    """Return the tensors of one entry by name."""
    dtype = TORCH_DTYPES[entry.dtype]
    return {
        name_of(entry.layer, part): Example((batch, num_heads, rows, width), dtype)
        for part, (num_heads, width) in entry.parts.items()
    }


# Share of a capture that is done when torch.onnx.export prints a step, and when it returns.
# Measured for a model of 24 layers, whose capture takes 30 s.
_SHARE_BY_STEP = {"Run decompositions...": 0.29, "Translate the graph into ONNX...": 0.77}
_SHARE_BEFORE_OPTIMIZING = 0.83


class ForestGraph(nn.Module):
    """The module that is captured: the model, with the inputs and outputs of its parts."""

    PLACE = "model"  # first part of the names of weights

    def __init__(
        self, model: nn.Module, parts: Sequence[ExportPart], form: AttentionForm | None
    ) -> None:
        super().__init__()
        self.add_module(self.PLACE, model)
        self.form = form  # None if masks are parts of biases
        self.contract = joined(parts)
        self._cache_name = cache_name(model)
        self._hooks = [part.hook(model, self) for part in parts]

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        inputs = dict(zip(self.contract.inputs, tensors, strict=True))
        caches = self.contract.caches
        past = {
            (entry.layer, entry.kind): tuple(inputs[past_name(entry.layer, p)] for p in entry.parts)
            for entry, _ in caches
        }
        cache = ForestCache(past, {e.kind: inputs[space.write_indices] for e, space in caches})
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
        outputs = {name: output() for name, output in call.outputs.items()} | present
        return [outputs[name] for name in self.contract.outputs]

    def computed(self, call: CapturedCall) -> Tensor:
        """Return the logits (R, V) of a prepared call."""
        model: Any = self.model
        logits: Tensor = model(**call.arguments).logits.squeeze(0)
        return logits


def captured_graph(
    module: nn.Module,
    checkpoint: Checkpoint,
    contract: ExportContract,
    report: Report,
    phase: str = "capturing the graph",
) -> ir.Model:
    """Return the graph of a module whose forward takes and returns lists of tensors.

    Raises ExportError if it cannot be captured.
    """
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
    # The optimizer removes additions of constants up to 1e-8 as additions of zero, among them the
    # epsilon of some norms. So norms are fused into single nodes first.
    fuse_norms(program.model)
    counter.passed(_SHARE_BEFORE_OPTIMIZING)
    program.optimize()
    return program.model


def _dynamic_shapes(examples: Sequence[Example]) -> list[dict[int, Any] | None]:
    """Return the dynamic axes of each input; axes of the same name share one Dim."""
    dims = {axis: axis.dim for example in examples for axis in example.axes.values()}
    return [
        {place: dims[axis] for place, axis in example.axes.items()} or None for example in examples
    ]
