"""Rows of the caches: masks, keys and values of every row, and recent rows.

Recent rows are inputs of convolutions, and rows of recurrences after their checkpoints. Short
convolutions follow the paths of a forest (docs/algorithm.md 3.11): a token reads its own input and
the inputs of its last k - 1 ancestors. An input of the graph has the ancestors' rows of the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsbd_export.capture.cache_graphs import write_fold_graph
from dsbd_export.capture.forest_graph import (
    NODES,
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    Made,
    RowSpace,
)
from dsbd_export.capture.path_recurrences import (
    Checkpoints,
    PastRows,
    PathRows,
    Recurrence,
    path_outputs,
    replaced_recurrences,
)
from dsbd_export.capture.replacements import ReplaceTorchFunctions, additive_mask
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_config import MASK_BY_LAYER_TYPE
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.bundle import FOLD_FILE
from dsbd_runtime.parts.attention.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.attention.cache_entries import (
    CONVOLUTION_ROWS,
    RECURRENT_ROWS,
    ConvolutionRows,
    attending,
    num_ancestors,
    recent,
    recurrent,
)
from dsbd_runtime.parts.recent.recent_rows import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
    SRC_RECENT_ROWS,
)

EVERY_ROW = RowSpace(Axis("C", 13), WRITE_INDICES, SRC_ROWS, "K")


class ExportedAttention(ExportPart):
    """Masks and rows of every engine; a model that has only recurrences reads a mask too."""

    def contract(self) -> ExportContract:
        checkpoint = self._checkpoint
        mask = Example((1, 1, NODES, EVERY_ROW.rows), torch.bool)
        return ExportContract(
            inputs={**dict.fromkeys(checkpoint.masks, mask), WRITE_INDICES: Example((1,))},
            spaces=(EVERY_ROW,),
            caches=tuple((entry, EVERY_ROW) for entry in attending(checkpoint.caches)),
            attended=tuple(filter(None, checkpoint.layer_masks)),
            entry={"masks": checkpoint.masks, "sliding_window": checkpoint.sliding_window},
            is_leading=True,
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        @contextmanager
        def masked(call: CapturedCall) -> Iterator[None]:
            masks = [call.inputs[name] for name in self._checkpoint.masks]
            if call.form is AttentionForm.OWN:
                masks = [additive_mask(mask, model.dtype) for mask in masks]
            call.arguments["attention_mask"] = self._mask_argument(masks)
            with ReplaceTorchFunctions():
                yield

        return masked

    def _mask_argument(self, masks: list[Tensor]) -> Tensor | dict[str, Tensor | None] | None:
        """Return the masks in the form in which ``generate`` passes prepared masks to a model.

        This is one tensor if all layers share it, else a dict by layer type.
        """
        checkpoint = self._checkpoint
        if not any(checkpoint.layer_masks):
            return None
        if len(masks) == 1 and not recent(checkpoint.caches):
            return masks[0]
        mask_by_name: dict[str | None, Tensor] = dict(zip(checkpoint.masks, masks, strict=True))
        return {
            kind: mask_by_name.get(name, masks[0]) if name else None
            for kind, name in MASK_BY_LAYER_TYPE.items()
        }


class PathConvolutions:
    """Replacement for torch's ``conv1d``: a convolution over each node's path."""

    def __init__(self, ancestors: Tensor) -> None:
        """Take each node's ancestors, (S, A) int64 cache rows, oldest first; -1 before its path."""
        self._ancestors = ancestors
        self._rows: Tensor | None = None
        self._new: Tensor | None = None

    def read(self, rows: Tensor, new: Tensor) -> None:
        """Set the rows of a cache, (1, 1, C, W), and the new rows, (1, W, S), of the next call."""
        self._rows, self._new = rows, new

    def convolved(
        self, states: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return (1, W, S): sums of k rows times k weights, added from the node upwards."""
        rows, new = self._rows, self._new
        self._rows = self._new = None
        num_channels, group, size = weight.shape
        if rows is None or new is None or (group, options.get("groups")) != (1, num_channels):
            raise ExportError(
                "a convolution over the sequence reads inputs that are in no cache; the family is "
                "not supported"
            )
        if size - 1 > self._ancestors.shape[1]:
            raise ExportError(
                f"a convolution reads {size} rows, expected {self._ancestors.shape[1] + 1} at most"
            )
        weight = weight[:, 0].to(new.dtype)
        total = new[0].t() * weight[:, -1]  # (S, W)
        for place in range(1, size):
            above = self._ancestors[:, -place]
            ancestor_rows = rows[0, 0][above.clamp(min=0)]
            seen = torch.where(
                above[:, None] >= 0, ancestor_rows, torch.zeros((), dtype=ancestor_rows.dtype)
            )
            total = total + seen * weight[:, -1 - place]
        if bias is not None:
            total = total + bias
        return total.t()[None]


RECENT = RowSpace(Axis("M", 11), RECENT_WRITE_INDICES, SRC_RECENT_ROWS, "N")
_CHECKPOINTS = Axis("B", 2)


class ExportedConvolutions(ExportPart):
    """Short convolutions over the paths of a forest."""

    def contract(self) -> ExportContract:
        caches = self._checkpoint.caches
        ancestors = Example((NODES, num_ancestors(caches)))
        entries = (entry for entry in caches if isinstance(entry, ConvolutionRows))
        return ExportContract(
            inputs={RECENT_WRITE_INDICES: Example((1,)), ANCESTORS: ancestors},
            spaces=(RECENT,),
            caches=tuple((entry, RECENT) for entry in entries),
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        def replaced(call: CapturedCall) -> ReplaceTorchFunctions:
            convolutions = PathConvolutions(call.inputs[ANCESTORS])
            call.cache.readers[CONVOLUTION_ROWS] = convolutions.read
            return ReplaceTorchFunctions({F.conv1d: convolutions.convolved})

        return replaced


class ExportedRecurrences(ExportPart):
    """Layers with a recurrent state, and the graph that folds rows into a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._entries = recurrent(checkpoint.caches)

    def contract(self) -> ExportContract:
        states = (state for entry in self._entries for state in entry.states.items())
        return ExportContract(
            inputs={
                RECENT_WRITE_INDICES: Example((1,)),
                RECENT_MASK: Example((1, 1, NODES, RECENT.rows), torch.bool),
                CHECKPOINT_ROWS: Example((_CHECKPOINTS, Axis("L", 4))),
                ROW_PLACES: Example((NODES,)),
                **{name: Example((_CHECKPOINTS, *s), torch.float32) for name, s in states},
            },
            spaces=(RECENT,),
            caches=tuple((entry, RECENT) for entry in self._entries),
            inexact="it has recurrent layers, whose sums over rows are not exact",
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        @contextmanager
        def replaced(call: CapturedCall) -> Iterator[None]:
            inputs = call.inputs
            checkpoints = Checkpoints(inputs[CHECKPOINT_ROWS], inputs[ROW_PLACES])
            write_indices = inputs[RECENT_WRITE_INDICES]
            rows = PathRows(inputs[RECENT_MASK][0, 0], write_indices, checkpoints)
            with replaced_recurrences(model, partial(self._outputs, call, rows)):
                yield

        return replaced

    def _outputs(self, call: CapturedCall, rows: PathRows, recurrence: Recurrence) -> Tensor:
        """Return the outputs of a layer's recurrence, (H, S, Dv), and keep its rows."""
        layer = call.cache.recurrent_layer
        past = call.cache.unwritten(layer, RECURRENT_ROWS)
        [entry] = (entry for entry in self._entries if entry.layer == layer)
        state, decay = (call.inputs[name] for name in entry.states)
        scatter = partial(call.cache.scattered, layer, RECURRENT_ROWS)
        outputs, present = path_outputs(recurrence, rows, PastRows(past, state, decay), scatter)
        call.cache.keep(layer, RECURRENT_ROWS, present)
        return outputs

    def write(self, made: Made) -> None:
        write_fold_graph(self._entries, made.folder / FOLD_FILE)
