"""Source of a feature draft, whose module is ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsbd_export.capture.part import ExportPart
from dsbd_export.capture.replacements import fix_rope, take_over_attention
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
from dsbd_export.feature_draft.graph import FeatureGraph, FeaturesOfParents
from dsbd_export.feature_draft.reference import (
    feature_cases,
    feature_logits,
    feature_references,
    largest_feature_values,
)
from dsbd_export.feature_draft.weights import load_feature_draft
from dsbd_export.model_source import EngineGraph, captured_engine
from dsbd_export.parity_cases import ComputeIn, ForestCase, Reference
from dsbd_export.parts.table import parts_of_engine
from dsbd_export.progress import Report
from dsbd_export.quantization.product_rows import RowsOfProducts, observed_rows
from dsbd_runtime.parts.cache_entries import equal_caches


class FeatureDraftSource:
    """A feature draft, whose module is ours."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, FeatureDraftCheckpoint)  # as its kind was asked for
        self._checkpoint = checkpoint

    def load(self, dtype: str, report: Report) -> Any:
        """See ModelSource."""
        return load_feature_draft(self._checkpoint)

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; the layer is one of two forms whose config tells."""
        layer = self._checkpoint.config
        caches = equal_caches(
            1, num_heads=layer.num_key_value_heads, head_dim=layer.head_dim, dtype=dtype
        )
        self._checkpoint = replace(self._checkpoint, caches=tuple(caches))
        return self._checkpoint

    def parts(self) -> list[ExportPart]:
        """See ModelSource."""
        return [*parts_of_engine(self._checkpoint), FeaturesOfParents(self._checkpoint)]

    def references(self, model: Any) -> list[Reference]:
        """See ModelSource."""
        return feature_references(model, self._checkpoint)

    def logits_in_float64(self, model: Any, case: ForestCase) -> NDArray[np.float64]:
        """See ModelSource."""
        with ComputeIn(torch.float64):
            return feature_logits(model, case)

    def product_rows(self, model: Any, texts: Sequence[str]) -> RowsOfProducts:
        """See ModelSource; ``check_form`` has refused texts."""
        with observed_rows(model) as found:
            feature_logits(model, feature_cases(self._checkpoint)[-1])
        return found

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """See ModelSource."""
        return largest_feature_values(model, self._checkpoint)

    def capture(self, model: Any, report: Report) -> list[EngineGraph]:
        """See ModelSource; the draft is changed in place: it then attends by a mask alone."""
        fix_rope(model)
        form = take_over_attention(model)
        assert form is AttentionForm.NODE  # of Llama and Qwen3
        module = FeatureGraph(model, self.parts(), form)
        return [EngineGraph(captured_engine(module, self._checkpoint, report))]
