"""Source of a feature draft, whose module is in this package."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsbd_export.capture.part import ExportPart
from dsbd_export.capture.replacements import fix_rope, take_over_attention
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.config import ModelOptions
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
from dsbd_export.feature_draft.graph import FeatureGraph, FeaturesOfParents
from dsbd_export.feature_draft.reference import (
    feature_cases,
    feature_logits,
    largest_feature_values,
)
from dsbd_export.feature_draft.weights import load_feature_draft
from dsbd_export.model_source import ModelSource
from dsbd_export.parity_cases import ForestCase
from dsbd_export.progress import Report
from dsbd_export.wider_precision import ComputeIn
from dsbd_runtime.parts.cache_entries import equal_caches


class FeatureDraftSource(ModelSource):
    """A feature draft."""

    GRAPH = FeatureGraph

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        assert isinstance(checkpoint, FeatureDraftCheckpoint)  # its kind was checked
        self._checkpoint: FeatureDraftCheckpoint = checkpoint

    def load(self, dtype: str, report: Report) -> Any:
        """See ModelSource."""
        return load_feature_draft(self._checkpoint)

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; the config determines the cache."""
        layer = self._checkpoint.config
        caches = equal_caches(
            1, num_heads=layer.num_key_value_heads, head_dim=layer.head_dim, dtype=dtype
        )
        self._checkpoint = replace(self._checkpoint, caches=tuple(caches))
        return self._checkpoint

    def parts(self, options: ModelOptions) -> list[ExportPart]:
        """See ModelSource."""
        return [*super().parts(options), FeaturesOfParents(self._checkpoint)]

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
        """See ModelSource."""
        return largest_feature_values(model, self._checkpoint)

    def _logits(self, model: Any, case: ForestCase, dtype: torch.dtype) -> NDArray[Any]:
        with nullcontext() if dtype is torch.float32 else ComputeIn(dtype):
            return feature_logits(model, case)

    def _cases(self) -> list[ForestCase]:
        return feature_cases(self._checkpoint)

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        return self._cases()[-1]  # ``check_form`` has refused texts

    def _prepare(self, model: Any) -> AttentionForm | None:
        fix_rope(model)
        return take_over_attention(model)
