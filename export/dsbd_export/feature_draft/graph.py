"""Graph of a feature draft: that of every draft, and the features that it takes and returns.

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

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from dsbd_export.capture.forest_graph import (
    ForestCache,
    GraphNames,
    LayerCache,
    captured_graph,
    empty_caches,
    input_names,
    output_names,
)
from dsbd_export.capture.graph_checks import check_contract
from dsbd_export.capture.replacements import ReplaceTorchFunctions, fix_rope, take_over_attention
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.weights import TORCH_DTYPES
from dsbd_export.draft_vocabulary import spread
from dsbd_export.feature_draft.model import FeatureDraft
from dsbd_export.feature_draft.weights import features_of
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import Report
from dsbd_runtime.parts.cache_entries import ATTENTION_ROWS
from dsbd_runtime.parts.feature_memory import FEATURE_INDEX, FEATURES, OWN_FEATURES, TARGET_FEATURES
from dsbd_runtime.parts.head import LOGIT_ROWS, LOGITS


class FeatureGraph(nn.Module):
    """The module that is captured: the draft behind the inputs and outputs of the contract."""

    def __init__(self, draft: FeatureDraft) -> None:
        super().__init__()
        self.draft = draft
        self._tokens = draft.proposed_tokens()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        write_indices: Tensor,
        logit_rows: Tensor,
        target_features: Tensor,
        own_features: Tensor,
        feature_index: Tensor,
        past: list[LayerCache],
    ) -> tuple[Tensor, Tensor, list[LayerCache]]:
        """Return logits (R, V) in float32, own features (S, H) and the caches with the new rows."""
        by_layer = {(layer, ATTENTION_ROWS): each for layer, each in enumerate(past)}
        cache = ForestCache(by_layer, write_indices)
        none = self.draft.norm.weight.new_zeros(1, own_features.shape[1])
        table = torch.cat([none, self.draft.projected(target_features), own_features])
        features = table.index_select(0, feature_index + 1)[None]
        with ReplaceTorchFunctions():
            normed, own = self.draft(input_ids, position_ids, features, mask, cache)
        logits = self.draft.lm_head(normed[0].index_select(0, logit_rows)).float()
        logits = spread(logits, self._tokens, self.draft.config.vocab_size)
        return logits, own[0], cache.present()


def graph_names(checkpoint: Checkpoint) -> GraphNames:
    """Return the inputs and outputs of the graph in their order."""
    inputs, outputs = input_names(checkpoint), output_names(checkpoint)
    behind = inputs.index(LOGIT_ROWS) + 1
    inputs[behind:behind] = [TARGET_FEATURES, OWN_FEATURES, FEATURE_INDEX]
    outputs.insert(outputs.index(LOGITS) + 1, FEATURES)
    return GraphNames(inputs, outputs)


def capture_feature_graph(draft: FeatureDraft, checkpoint: Checkpoint, report: Report) -> ir.Model:
    """Return the graph of a draft, which is changed in place: it then attends by a mask alone."""
    fix_rope(draft)
    form = take_over_attention(draft)
    arguments, dynamic_shapes = _example(checkpoint)
    names = graph_names(checkpoint)
    graph = captured_graph(
        FeatureGraph(draft), checkpoint, names, arguments, dynamic_shapes, report
    )
    optimize_graph(graph)
    assert form is AttentionForm.NODE  # of Llama and Qwen3
    check_contract(graph, checkpoint, form, names)
    return graph


def _example(checkpoint: Checkpoint) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return example arguments of ``FeatureGraph.forward`` and which of their axes are dynamic."""
    features, dtype = features_of(checkpoint), TORCH_DTYPES[checkpoint.caches[0].dtype]
    num_nodes, capacity, num_logits, num_target, num_own = 5, 13, 3, 4, 2
    nodes, rows, logits, target, own = (
        torch.export.Dim(name, min=low)
        for name, low in (("S", 1), ("C", 1), ("R", 0), ("F", 0), ("P", 0))
    )
    arguments = (
        torch.zeros(1, num_nodes, dtype=torch.int64),
        torch.arange(num_nodes)[None],
        torch.ones(1, 1, num_nodes, capacity, dtype=torch.bool),
        torch.tensor([3]),
        torch.arange(num_logits),
        torch.zeros(num_target, features.feature_width, dtype=dtype),
        torch.zeros(num_own, features.layer.hidden_size, dtype=dtype),
        torch.arange(num_nodes),
        empty_caches(checkpoint.caches, capacity),
    )
    dynamic_shapes = (
        {1: nodes},
        {1: nodes},
        {2: nodes, 3: rows},
        None,
        {0: logits},
        {0: target},
        {0: own},
        {0: nodes},
        [({2: rows}, {2: rows})],
    )
    return arguments, dynamic_shapes
