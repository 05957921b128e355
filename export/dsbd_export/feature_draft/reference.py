"""Cases of the parity gate for a feature draft on random features, with the checkpoint's logits."""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint
from dsbd_export.feature_draft.model import FeatureDraft
from dsbd_export.parity_cases import TREE, ForestCase, forest_cases, prefill_case

_NUM_ROWS = 128  # of the case that judges a lower precision


def feature_cases(checkpoint: FeatureDraftCheckpoint) -> list[ForestCase]:
    """Return the forests of every model with features of the target, equal at every call."""
    rng = np.random.default_rng(1)
    # It may have no tokenizer, and has its target's tokens.
    length = min(_NUM_ROWS, checkpoint.context_length)
    tokens = rng.integers(0, checkpoint.vocab_size, length, dtype=np.int64)
    # Random rows in place of the text that other models are judged by.
    cases = [*forest_cases(checkpoint, checkpoint.vocab_size), prefill_case(checkpoint, tokens)]
    width, drawn = checkpoint.features.feature_width, []
    for case in cases:
        size = (len(case.prefix_ids) + len(case.node_ids), width)
        features = rng.standard_normal(size, dtype=np.float32)
        drawn.append(dataclasses.replace(case, features=features, uses_own=case.name == TREE))
    return drawn


@torch.no_grad()
def feature_logits(draft: FeatureDraft, case: ForestCase) -> NDArray[Any]:
    """Return (R, V) float32: each node's logits, computed along its path alone."""
    assert case.features is not None  # a case of ``feature_cases``
    num_prefix, num_nodes = len(case.prefix_ids), len(case.node_ids)
    tokens = torch.from_numpy(np.concatenate([case.prefix_ids, case.node_ids]))
    projected = draft.projected(torch.from_numpy(case.features))
    logits: dict[int, NDArray[Any]] = {}
    leaves = sorted(set(range(num_nodes)) - set(case.parents.tolist()))
    for path in map(case.path_to, leaves):
        places = torch.tensor([*range(num_prefix), *(num_prefix + node for node in path)])
        num_given = num_prefix + 1 if case.uses_own else len(places)
        normed = rolled_out(draft, tokens[places], projected[places[:num_given]])
        found = draft.target_logits(normed[num_prefix:])
        for node, row in zip(path, found, strict=True):
            logits[node] = row.numpy()
    return np.stack([logits[node] for node in case.rows])


def rolled_out(draft: FeatureDraft, tokens: Tensor, features: Tensor) -> Tensor:
    """Return the head's input along one path, (n, H), with own features after the given ones.

    tokens: (n,) int64. features: (m, H), m <= n, projected, of the tokens before the first m.
    """
    while True:
        length = len(features)
        is_seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        normed, own = draft(
            tokens[None, :length], torch.arange(length)[None], features[None], is_seen
        )
        if length == len(tokens):
            result: Tensor = normed[0]
            return result
        features = torch.cat([features, own[0, -1:]])


@torch.no_grad()
def largest_feature_values(
    draft: FeatureDraft, checkpoint: FeatureDraftCheckpoint
) -> dict[int, NDArray[np.float32]]:
    """Return the largest magnitude of every cached value channel, (Hkv, D), of layer 0."""
    attention: Any = draft.get_submodule("layers.0.self_attn")
    largest: list[Tensor] = []
    hook = attention.v_proj.register_forward_hook(
        lambda _module, _inputs, output: largest.append(output.abs().amax((0, 1)))
    )
    try:
        for case in feature_cases(checkpoint):
            feature_logits(draft, case)
    finally:
        hook.remove()
    found = torch.stack(largest).amax(0).reshape(-1, attention.head_dim).numpy()
    return {0: found}
