"""Model source of a feature draft; its graph also takes and returns features.

| further tensor | shape | meaning |
|---|---|---|
| input target_features | [F, width] | features that the target's graph returned; F may be 0 |
| input own_features | [P, H] | features that this graph returned; P may be 0 |
| input feature_index | [S] int64 | index of the feature of the token before each node: below F a |
| | | target's feature, F + p for own feature p, -1 for zeros |
| output features | [S, H] | own features of the S nodes |

Logits are over the target's vocabulary, -inf for tokens that the draft cannot propose. The parity
gate compares logits on random features.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_export.capture.caches import RecordingCache
from dsbd_export.capture.forest_graph import (
    NODES,
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    ForestGraph,
    Hook,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import TORCH_DTYPES
from dsbd_export.config import ModelOptions
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
from dsbd_export.feature_draft.model import load_feature_draft
from dsbd_export.model_source import ModelSource
from dsbd_export.parity_cases import TREE, ComputeIn, ForestCase, forest_cases, prefill_case
from dsbd_export.progress import Report
from dsbd_runtime.parts.attention.cache_entries import equal_caches
from dsbd_runtime.parts.feature.feature_memory import (
    FEATURE_INDEX,
    FEATURES,
    OWN_FEATURES,
    TARGET_FEATURES,
)
from dsbd_runtime.parts.feature.features import FeatureEntry
from dsbd_runtime.parts.head.head import LOGIT_ROWS

_NUM_ROWS = 128  # rows of the case that judges a lower precision


def feature_cases(checkpoint: FeatureDraftCheckpoint) -> list[ForestCase]:
    """Return the forests of ``forest_cases`` with random features; the same in every call."""
    rng = np.random.default_rng(1)
    # The draft may have no tokenizer; its tokens are the target's.
    length = min(_NUM_ROWS, checkpoint.context_length)
    tokens = rng.integers(0, checkpoint.vocab_size, length, dtype=np.int64)
    # Other models are judged by a text, this one by random rows.
    cases = [*forest_cases(checkpoint, checkpoint.vocab_size), prefill_case(checkpoint, tokens)]
    width, drawn = checkpoint.features.feature_width, []
    for case in cases:
        size = (len(case.prefix_ids) + len(case.node_ids), width)
        features = rng.standard_normal(size, dtype=np.float32)
        drawn.append(dataclasses.replace(case, features=features, uses_own=case.name == TREE))
    return drawn


@torch.no_grad()
def feature_logits(
    draft: Any, case: ForestCase, new_cache: Callable[[], Any] = lambda: None
) -> NDArray[Any]:
    """Return the nodes' logits, (R, V) float32, each computed along the node's path alone.

    draft: a ``FeatureDraft``, or a module with its methods. new_cache: makes a cache for each call.
    """
    assert case.features is not None  # a case of ``feature_cases``
    num_prefix, num_nodes = len(case.prefix_ids), len(case.node_ids)
    tokens = torch.from_numpy(np.concatenate([case.prefix_ids, case.node_ids]))
    projected = draft.projected(torch.from_numpy(case.features))
    logits: dict[int, NDArray[Any]] = {}
    leaves = sorted(set(range(num_nodes)) - set(case.parents.tolist()))
    for path in map(case.path_to, leaves):
        places = torch.tensor([*range(num_prefix), *(num_prefix + node for node in path)])
        num_given = num_prefix + 1 if case.uses_own else len(places)
        normed = rolled_out(draft, tokens[places], projected[places[:num_given]], new_cache)
        path_logits = draft.target_logits(normed[num_prefix:])
        for node, row in zip(path, path_logits, strict=True):
            logits[node] = row.numpy()
    return np.stack([logits[node] for node in case.rows])


def rolled_out(
    draft: Any, tokens: Tensor, features: Tensor, new_cache: Callable[[], Any] = lambda: None
) -> Tensor:
    """Return the head's input along one path, (n, H); own features follow the given features.

    tokens: (n,) int64. features: (m, H), m <= n, projected; row i is the feature of the token
        before ``tokens[i]``.
    """
    while True:
        length = len(features)
        places = torch.arange(length)[None]
        # Without a mask it is causal.
        normed, own_features = draft(
            tokens[None, :length], places, features[None], None, new_cache()
        )
        if length == len(tokens):
            result: Tensor = normed[0]
            return result
        features = torch.cat([features, own_features[0, -1:]])


@torch.no_grad()
def largest_feature_values(
    draft: Any, checkpoint: FeatureDraftCheckpoint
) -> dict[int, NDArray[np.float32]]:
    """Return the largest magnitude of every cached value channel, (Hkv, D), of layer 0."""
    largest: list[Tensor] = []
    for case in feature_cases(checkpoint):
        caches: list[RecordingCache] = []
        feature_logits(draft, case, partial(_appended, caches))
        largest += [cache.rows[0][1].abs().amax((0, 2)) for cache in caches]
    return {0: torch.stack(largest).amax(0).numpy()}


def _appended(caches: list[RecordingCache]) -> RecordingCache:
    caches.append(RecordingCache())
    return caches[-1]


class FeatureGraph(ForestGraph):
    """The captured module: the draft, with the inputs and outputs of its parts."""

    PLACE = "draft"

    def computed(self, call: CapturedCall) -> Tensor:
        draft: Any = self.draft
        normed, own_features = draft(**call.arguments)
        call.outputs[FEATURES] = lambda: own_features[0]
        logits: Tensor = draft.lm_head(normed[0].index_select(0, call.inputs[LOGIT_ROWS]))
        return logits


class FeaturesOfParents(ExportPart):
    """Features that a draft reads, and features that it returns for its next nodes."""

    def __init__(self, checkpoint: FeatureDraftCheckpoint) -> None:
        self._checkpoint, self._features = checkpoint, checkpoint.features

    def contract(self) -> ExportContract:
        features, dtype = self._features, TORCH_DTYPES[self._checkpoint.caches[0].dtype]
        target_axis, own_axis = Axis("F", 4, min_size=0), Axis("P", 2, min_size=0)
        own_width = int(features.layer.hidden_size)
        entry = FeatureEntry(width=features.feature_width, own_width=own_width)
        return ExportContract(
            inputs={
                TARGET_FEATURES: Example((target_axis, features.feature_width), dtype),
                OWN_FEATURES: Example((own_axis, features.layer.hidden_size), dtype),
                FEATURE_INDEX: Example((NODES,)),
            },
            outputs=(FEATURES,),
            entry={"features": entry},
            is_leading=True,
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        if self._checkpoint.names_proposed:
            graph._tokens = model.proposed_tokens()

        def reading(call: CapturedCall) -> nullcontext[None]:
            given, inputs = call.arguments, call.inputs
            del given["use_cache"], given["logits_to_keep"]
            own_features = inputs[OWN_FEATURES]
            none = own_features.new_zeros(1, own_features.shape[1])
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
        if dtype is torch.float32:
            return feature_logits(model, case)
        model.set_experts_implementation("eager")  # grouped products have no float64
        with ComputeIn(dtype):
            return feature_logits(model, case)

    def _cases(self) -> list[ForestCase]:
        return feature_cases(self._checkpoint)

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        return self._cases()[-1]  # ``check_form`` has refused texts
