"""Model source of a feature draft; its graph also takes and returns features.

| further tensor | shape | meaning |
|---|---|---|
| input target_features | [F, width] | features that the target's graph returned; F may be 0 |
| input own_features | [P, H] | features that this graph returned; P may be 0 |
| input feature_index | [S] int64 | the feature of the token before each node: below F one of the |
| | | target's, then F + p for an own one; -1 for zeros |
| output features | [S, H] | own features of the S nodes |

Logits are over the target's vocabulary, -inf for tokens that the draft cannot propose.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_export.capture.forest_graph import ForestGraph
from dsbd_export.capture.part import (
    NODES,
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
)
from dsbd_export.capture.replacements import fix_rope, take_over_attention
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.weights import TORCH_DTYPES
from dsbd_export.config import ModelOptions
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
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
from dsbd_runtime.parts.feature_memory import FEATURE_INDEX, FEATURES, OWN_FEATURES, TARGET_FEATURES
from dsbd_runtime.parts.features import FeatureEntry
from dsbd_runtime.parts.head import LOGIT_ROWS


class FeatureGraph(ForestGraph):
    """The captured module: the draft, with the inputs and outputs of its parts."""

    PLACE = "draft"

    def computed(self, call: CapturedCall) -> Tensor:
        """See ForestGraph; own features are also an output."""
        draft: Any = self.draft
        normed, own = draft(**call.arguments)
        call.outputs[FEATURES] = lambda: own[0]
        logits: Tensor = draft.lm_head(normed[0].index_select(0, call.inputs[LOGIT_ROWS]))
        return logits


class FeaturesOfParents(ExportPart):
    """Features that a draft reads, and features that it returns for its next nodes."""

    def __init__(self, checkpoint: FeatureDraftCheckpoint) -> None:
        self._checkpoint, self._features = checkpoint, checkpoint.features

    def contract(self) -> ExportContract:
        features, dtype = self._features, TORCH_DTYPES[self._checkpoint.caches[0].dtype]
        target, own = Axis("F", 4, least=0), Axis("P", 2, least=0)
        own_width = int(features.layer.hidden_size)
        entry = FeatureEntry(width=features.feature_width, own_width=own_width)
        return ExportContract(
            inputs={
                TARGET_FEATURES: Example((target, features.feature_width), dtype),
                OWN_FEATURES: Example((own, features.layer.hidden_size), dtype),
                FEATURE_INDEX: Example((NODES,)),
            },
            outputs=(FEATURES,),
            entry={"features": entry},
            is_leading=True,
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        graph._tokens = model.proposed_tokens()

        def reading(call: CapturedCall) -> nullcontext[None]:
            given, inputs = call.arguments, call.inputs
            del given["use_cache"], given["logits_to_keep"]
            own_features = inputs[OWN_FEATURES]
            none = model.norm.weight.new_zeros(1, own_features.shape[1])
            table = torch.cat([none, model.projected(inputs[TARGET_FEATURES]), own_features])
            given["features"] = table.index_select(0, inputs[FEATURE_INDEX] + 1)[None]
            return nullcontext()

        return reading


class FeatureDraftSource(ModelSource):
    """A feature draft."""

    GRAPH = FeatureGraph

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        assert isinstance(checkpoint, FeatureDraftCheckpoint)  # its kind was checked
        self._checkpoint: FeatureDraftCheckpoint = checkpoint

    def load(self, dtype: str, report: Report) -> Any:
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
        return [*super().parts(options), FeaturesOfParents(self._checkpoint)]

    def largest_values(self, model: Any) -> dict[int, NDArray[np.float32]]:
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
