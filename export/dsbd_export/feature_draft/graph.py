"""Graph of a feature draft: as for every draft, with the features that it takes and returns.

| further tensor | shape | meaning |
|---|---|---|
| input target_features | [F, width] | features that the target's graph returned; F may be 0 |
| input own_features | [P, H] | features that this graph returned; P may be 0 |
| input feature_index | [S] int64 | the feature of the token before each node: below F one of the |
| | | target's, then F + p for an own one; -1 for zeros |
| output features | [S, H] | own features of the S nodes |

Logits are over the target's vocabulary, -inf for tokens that the draft cannot propose.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
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
from dsbd_export.checkpoints.weights import TORCH_DTYPES
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
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
        """See ExportPart."""
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
        """See ExportPart."""
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
