"""Recent rows: inputs of convolutions, and rows of recurrences after their checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsbd_export.capture.cache_graphs import write_fold_graph
from dsbd_export.capture.part import (
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
from dsbd_export.capture.path_convolutions import PathConvolutions
from dsbd_export.capture.path_recurrences import (
    Checkpoints,
    PastRows,
    PathRows,
    Recurrence,
    path_outputs,
    replaced_recurrences,
)
from dsbd_export.capture.replacements import ReplaceTorchFunctions
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_runtime.bundle_files.bundle import FOLD_FILE
from dsbd_runtime.parts.cache_entries import (
    CONVOLUTION_ROWS,
    RECURRENT_ROWS,
    ConvolutionRows,
    num_ancestors,
    recurrent,
)
from dsbd_runtime.parts.recent_rows import (
    ANCESTORS,
    CHECKPOINT_ROWS,
    RECENT_MASK,
    RECENT_WRITE_INDICES,
    ROW_PLACES,
    SRC_RECENT_ROWS,
)

RECENT = RowSpace(Axis("M", 11), RECENT_WRITE_INDICES, SRC_RECENT_ROWS, "N")
_CHECKPOINTS = Axis("B", 2)


class ExportedConvolutions(ExportPart):
    """Short convolutions over the paths of a forest."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._caches = checkpoint.caches

    def contract(self) -> ExportContract:
        ancestors = Example((NODES, num_ancestors(self._caches)))
        entries = (entry for entry in self._caches if isinstance(entry, ConvolutionRows))
        return ExportContract(
            inputs={RECENT_WRITE_INDICES: Example((1,)), ANCESTORS: ancestors},
            spaces=(RECENT,),
            caches=tuple((entry, RECENT) for entry in entries),
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        """See ExportPart."""

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
        """See ExportPart."""

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
