"""Shape, first weights and files of a distilled feature draft.

The layout of the speculators library with the norms of EAGLE 3.1: each hidden state of the target
is normalized before the projection, and the draft's own feature is its normalized output.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import PreTrainedModel

from dsbd_distill.draft_model import hidden_sizes, largest_shape, llama_config, projected
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_config import normalized_config
from dsbd_export.feature_draft.config import FeatureDraftConfig
from dsbd_export.feature_draft.model import FeatureDraft
from dsbd_export.parts.features import default_layers

_LIBRARY_VERSION = "0.3.0"  # the layout is this version's


@dataclass(frozen=True, kw_only=True)
class FeatureShape:
    """Sizes of a feature draft."""

    hidden_size: int

    @property
    def intermediate_size(self) -> int:
        """Return the width of the MLP."""
        return self.hidden_size * 3

    def num_parameters(self, vocab_size: int, num_proposed: int, feature_width: int) -> int:
        """Return the number of parameters; embedding and head are separate."""
        size = self.hidden_size
        layer = 7 * size**2 + 3 * size * self.intermediate_size
        norms = 4 * size + feature_width
        return (vocab_size + num_proposed) * size + feature_width * size + layer + norms


def feature_shape(
    wanted: int | None, num_of_target: int, target: Checkpoint, num_proposed: int | None = None
) -> FeatureShape:
    """Return the largest shape of at most ``wanted`` parameters; see ``largest_shape``."""
    width = len(feature_layers(target)) * feature_size(target)
    shapes = [FeatureShape(hidden_size=size) for size in hidden_sizes()]
    num_own = target.vocab_size if num_proposed is None else num_proposed
    sizes = [(shape, shape.num_parameters(target.vocab_size, num_own, width)) for shape in shapes]
    return largest_shape(wanted, num_of_target, sizes, target.vocab_size)


def new_feature_draft(
    target: PreTrainedModel,
    checkpoint: Checkpoint,
    shape: FeatureShape,
    seed: int,
    proposed: NDArray[np.int64] | None = None,
    *,
    keeps_embedding: bool = False,
) -> FeatureDraft:
    """Return a feature draft whose embedding and head are the target's, projected.

    proposed: (n,) int64, ascending. Tokens that its head has logits for; None: all.
    keeps_embedding: whether the embedding stays untrained, as in EAGLE-3.
    """
    torch.manual_seed(seed)
    layer = llama_config(
        checkpoint,
        shape.hidden_size,
        shape.intermediate_size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    draft = FeatureDraft(
        FeatureDraftConfig(
            layer=layer,
            draft_vocab_size=checkpoint.vocab_size if proposed is None else len(proposed),
            target_hidden_size=feature_size(checkpoint),
            layers=feature_layers(checkpoint),
            norm_output=True,
            fc_norm=True,
        )
    )
    table = target.get_output_embeddings().weight.detach().cpu()
    first = projected(table, shape.hidden_size, layer.initializer_range)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(first)
        if proposed is not None:
            tokens = torch.from_numpy(proposed)
            draft.d2t.copy_(tokens - torch.arange(len(tokens)))
            first = first[tokens]
        draft.lm_head.weight.copy_(first)
    if keeps_embedding:
        draft.embed_tokens.weight.requires_grad_(False)
    return draft


def write_feature_draft(draft: FeatureDraft, target: Checkpoint, folder: Path) -> None:
    """Write config and weights, in fp32."""
    features = draft.features
    content: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _LIBRARY_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": target.folder.resolve().name,
                "architectures": list(target.config.architectures or []),
            },
        },
        "draft_vocab_size": features.draft_vocab_size,
        "target_hidden_size": features.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(features.layers or ()),
        "norm_before_residual": features.norm_before_residual,
        "norm_before_fc": features.norm_before_fc,
        "fc_norm": features.fc_norm,
        "norm_output": features.norm_output,
        "tie_word_embeddings": False,
        "transformer_layer_config": features.layer.to_diff_dict(),
    }
    folder.mkdir(parents=True)
    text = json.dumps(content, indent=2, allow_nan=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    weights = {name: value.cpu().contiguous() for name, value in draft.state_dict().items()}
    if (tokens := draft.proposed_tokens()) is None:
        del weights["d2t"]  # its tokens are the target's
    else:
        is_proposed = torch.zeros(features.layer.vocab_size, dtype=torch.bool)
        is_proposed[tokens.cpu()] = True
        weights["t2d"] = is_proposed
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def feature_layers(target: Checkpoint) -> tuple[int, ...]:
    """Return the layers of a target whose input hidden states a draft reads."""
    return default_layers(normalized_config(target.config).num_layers)


def feature_size(target: Checkpoint) -> int:
    """Return the width of one hidden state of a target."""
    width: int = normalized_config(target.config).hidden_size
    return width
