"""Part: one kind of state of an engine, in its graph, in other files and in the manifest."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dsbd_export.capture.forest_cache import ForestCache
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.weights import TORCH_DTYPES
from dsbd_export.config import ModelOptions
from dsbd_export.parity_cases import Reference
from dsbd_export.progress import Report
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.parts.attention_rows import INPUT_IDS, POSITION_IDS
from dsbd_runtime.parts.cache_entries import CacheEntry, past_name, present_name


@dataclass(frozen=True)
class Axis:
    """A dynamic axis of the graph, and its length in the captured example."""

    name: str
    size: int
    least: int = 1
    most: int | None = None

    @property
    def dim(self) -> Any:
        """Return the axis as torch.export takes it; equal names are one axis."""
        return torch.export.Dim(self.name, min=self.least, max=self.most)


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
    """Rows that are written, and moved, by inputs of their own."""

    rows: Axis
    write_indices: str  # name of the input with the first of the new rows
    src_rows: str  # name of the input of the prune graph with the rows to keep
    num_kept: str  # name of its axis


@dataclass(frozen=True, kw_only=True)
class ExportContract:
    """Inputs and outputs of a graph, those of one part or of all."""

    # an example of each by name, in the order of the graph; caches are left out
    inputs: Mapping[str, Example] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()  # names; caches are left out
    spaces: tuple[RowSpace, ...] = ()
    caches: tuple[tuple[CacheEntry, RowSpace], ...] = ()
    attended: tuple[str, ...] = ()  # the mask of every layer that attends
    # fields of the manifest entry, as the parity gate judges the engine
    entry: Mapping[str, Any] = field(default_factory=dict)
    is_leading: bool = False  # whether inputs and outputs stand before the caches
    inexact: str = ""  # why sums cannot be exact in this graph; "" if they can

    @property
    def tensors(self) -> list[tuple[CacheEntry, str, RowSpace]]:
        """Return every tensor of the caches: entry, part of its name, and space."""
        return [(entry, part, space) for entry, space in self.caches for part in entry.parts]


@dataclass
class CapturedCall:
    """The call of a model that is captured, which parts prepare one after the other."""

    form: AttentionForm | None
    inputs: Mapping[str, Tensor]
    cache: ForestCache
    arguments: dict[str, Any]
    logits: Tensor = field(init=False)  # (R, V), once the model has returned
    # of the graph by name, computed after the model
    outputs: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


Hook = Callable[[CapturedCall], AbstractContextManager[object]]
"""Prepares a call, and is the context in which the model computes it."""


@dataclass(frozen=True)
class Made:
    """Files and references of a model that is being exported."""

    folder: Path
    # the cases of the parity gate, with the checkpoint's own results
    references: Sequence[Reference]
    options: ModelOptions
    judged: Bundle  # the bundle, without a manifest yet, as the parity gate judges the engine
    report: Report


class ExportPart(Protocol):
    """One kind of state; a kind defines only the methods that it needs."""

    def contract(self) -> ExportContract:
        """Return its inputs, its outputs and the caches of its rows."""
        return ExportContract()

    def refer(self, model: Any, references: list[Reference]) -> list[Reference]:
        """Return the references with results of the unmodified model, to compare this part with."""
        return references

    def hook(self, model: Any, graph: Any) -> Hook:
        """Return a function that prepares a call; tensors of ``graph`` become constants."""
        return lambda _call: contextlib.nullcontext()

    def write(self, made: Made) -> None:
        """Write the graphs that the parity gate runs in addition to model.onnx."""
        return

    def complete(self, made: Made) -> dict[str, Any]:
        """Return changed fields of the entry; raise ExportError if results differ."""
        return {}


def joined(parts: Iterable[ExportPart]) -> ExportContract:
    """Return the contract of a graph with these parts, caches in the order of the layers."""
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
