"""Exports of the same models in several precisions, whose graphs are captured once.

The capture takes most of the time of a tiny model's export, and does not depend on what is done to
its graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.model_source import ModelSource, source_of
from dsbd_export.outliers import Outliers
from dsbd_export.parity_cases import ForestCase, Reference
from dsbd_export.progress import Report
from dsbd_runtime.graph import CacheEntry


class SharedCaptures:
    """``source_of`` of several exports; their checkpoints stay as they are meanwhile."""

    def __init__(self) -> None:
        """Begin without a graph."""
        self._graph_by_checkpoint: dict[str, onnx.ModelProto] = {}

    def __call__(self, checkpoint: Checkpoint) -> ModelSource:
        """Return the source of a checkpoint; its ``capture`` is that of an earlier export."""
        proposed = checkpoint.proposed_tokens  # whose repr leaves out most of many
        key = f"{checkpoint} {None if proposed is None else proposed.tolist()}"
        return _SharedSource(source_of(checkpoint), key, self._graph_by_checkpoint)


class _SharedSource:
    """The source of one export."""

    def __init__(
        self, source: ModelSource, key: str, graph_by_checkpoint: dict[str, onnx.ModelProto]
    ) -> None:
        self._source, self._key, self._graph_by_checkpoint = source, key, graph_by_checkpoint

    def load(self, dtype: str) -> Any:
        """See ModelSource."""
        return self._source.load(dtype)

    def references(self, model: Any) -> list[Reference]:
        """See ModelSource."""
        return self._source.references(model)

    def caches(self, model: Any, dtype: str) -> tuple[CacheEntry, ...]:
        """See ModelSource."""
        return self._source.caches(model, dtype)

    def logits_in_float64(self, model: Any, case: ForestCase) -> NDArray[np.float64]:
        """See ModelSource."""
        return self._source.logits_in_float64(model, case)

    def outliers(self, model: Any) -> Outliers:
        """See ModelSource."""
        return self._source.outliers(model)

    def largest_values(self, model: Any) -> list[NDArray[np.float32]]:
        """See ModelSource."""
        return self._source.largest_values(model)

    def capture(self, model: Any, report: Report) -> ir.Model:
        """Return a graph with weights of its own: an export releases those of its model."""
        if self._key not in self._graph_by_checkpoint:
            graph = self._source.capture(model, report)
            self._graph_by_checkpoint[self._key] = ir.serde.serialize_model(graph)
        return ir.serde.deserialize_model(self._graph_by_checkpoint[self._key])
