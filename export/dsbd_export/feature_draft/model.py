"""Feature draft as a torch module, for training and for the capture of its graph; its weights.

    x = [input_layernorm(embedding of the token), hidden_norm(feature of the token before)]
    h = feature + attention(x)           the feature after its norm with ``norm_before_residual``
    own feature = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(own feature))

``fc`` projects a feature of the target to the draft's width; own features already have that width.
Logits are over the draft's vocabulary; ``target_logits`` maps them to the target's vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import open_weights, plain_name, safetensors_files
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.feature_draft.checkpoint import FeatureDraftCheckpoint, FeatureDraftConfig
from dsbd_export.parts.draft_vocabulary import spread

_ATTENTIONS: dict[str, Callable[..., Any]] = {"llama": LlamaAttention, "qwen3": Qwen3Attention}


class FeatureLayer(nn.Module):
    """The transformer layer; its attention reads an embedding and a feature, concatenated."""

    def __init__(self, config: FeatureDraftConfig) -> None:
        super().__init__()
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self._norm_before_residual = config.norm_before_residual
        self.self_attn = _ATTENTIONS[layer.model_type](layer, 0)
        self._cache_name = cache_name(self.self_attn)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        if layer.model_type != "llama":
            layer.mlp_bias = False  # Qwen3's MLP is Llama's without biases
        self.mlp = LlamaMLP(layer)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        mask: Tensor | None,
        angles: tuple[Tensor, Tensor],
        cache: Any,
    ) -> Tensor:
        """Return the residual stream after the layer, (B, S, H).

        embeddings, features: (B, S, H). mask, cache: of transformers. angles: cos and sin.
        """
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended, _ = self.self_attn(
            both, position_embeddings=angles, attention_mask=mask, **{self._cache_name: cache}
        )
        hidden = residual + attended
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class FeatureDraft(LlamaPreTrainedModel):  # type: ignore[misc]  # transformers has no types
    """A feature draft."""

    def __init__(self, features: FeatureDraftConfig) -> None:
        layer = features.layer
        super().__init__(layer)
        size = layer.hidden_size
        self.features = features
        self.embed_tokens = nn.Embedding(layer.vocab_size, size)
        self.fc = nn.Linear(features.feature_width, size, bias=features.fc_bias)
        self.input_norm = self.fc_norm = None
        if features.norm_before_fc:
            self.input_norm = LlamaRMSNorm(features.feature_width, eps=layer.rms_norm_eps)
        if features.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(features.target_hidden_size, eps=layer.rms_norm_eps)
                for _ in range(features.num_target_layers)
            )
        self.layers = nn.ModuleList([FeatureLayer(features)])  # name in published checkpoints
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        self.norm = LlamaRMSNorm(size, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, features.draft_vocab_size, bias=False)
        if features.ties_head:
            self.lm_head.weight = self.embed_tokens.weight
        # For each draft token: the target's id minus the draft's.
        self.register_buffer("d2t", torch.zeros(features.draft_vocab_size, dtype=torch.int64))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def projected(self, target_features: Tensor) -> Tensor:
        """Return features of the target, (..., num_layers * Ht), in the draft's width, (..., H)."""
        if self.input_norm is not None:
            target_features = self.input_norm(target_features)
        if self.fc_norm is not None:
            parts = target_features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            target_features = torch.cat(normed, dim=-1)
        result: Tensor = self.fc(target_features)
        return result

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        features: Tensor,
        attention_mask: Tensor | None,
        cache: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the head's input and own features, (B, S, H) each.

        input_ids, position_ids: (B, S) int64. features: (B, S, H), projected.
        """
        embeddings = self.embed_tokens(input_ids)
        angles = self.rotary_emb(embeddings, position_ids)
        hidden = self.layers[0](embeddings, features, attention_mask, angles, cache)
        normed: Tensor = self.norm(hidden)
        return normed, normed if self.features.norm_output else hidden

    def target_logits(self, normed: Tensor) -> Tensor:
        """Return float32 logits over the target's vocabulary, (..., V), of normed (..., H)."""
        logits = self.lm_head(normed).float()
        return spread(logits, self.proposed_tokens(), self.config.vocab_size)

    def proposed_tokens(self) -> Tensor | None:
        """Return the target's token for each of the draft's, (Vd,) int64; None if all are equal."""
        num_proposed = self.features.draft_vocab_size
        if num_proposed == self.config.vocab_size and not self.d2t.any():
            return None
        d2t: Tensor = self.d2t
        return torch.arange(num_proposed, device=d2t.device) + d2t


_OLD_FILE = "pytorch_model.bin"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_OF_TARGET = {
    _EMBEDDING: ["model.embed_tokens.weight"],
    _HEAD: ["lm_head.weight", "model.embed_tokens.weight"],  # the second if both are tied
}
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies of the target's
_RENAMED = {"midlayer.": "layers.0."}


def load_feature_draft(checkpoint: FeatureDraftCheckpoint) -> FeatureDraft:
    """Return the draft in evaluation mode and fp32; raise ExportError if weights do not fit."""
    features = checkpoint.features
    weights = dict(_weights(checkpoint))
    is_proposed = weights.pop("t2d", None)
    draft = FeatureDraft(features)
    wanted = dict(draft.state_dict())
    if features.ties_head:
        del wanted[_HEAD]
        weights.pop(_HEAD, None)
    weights.setdefault("d2t", torch.zeros(features.draft_vocab_size, dtype=torch.int64))
    for name in (_EMBEDDING, _HEAD):
        if name in wanted and name not in weights:
            weights[name] = _of_target(checkpoint, name)
    _check(checkpoint, weights, {name: tuple(value.shape) for name, value in wanted.items()})
    _check_tokens(checkpoint, weights["d2t"], is_proposed)
    draft.load_state_dict(weights, strict=not features.ties_head)  # in fp32, as the module is
    draft.eval()
    return draft


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield names, as in the module, and weights."""
    folder = checkpoint.folder
    try:
        if safetensors_files(folder):
            with open_weights(folder) as readers:
                stored = {name: reader[:] for name, reader in readers.items()}
        else:
            stored = torch.load(folder / _OLD_FILE, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ExportError(
            f"the draft at {folder} cannot be loaded: {reason_of(error)}; check its files"
        ) from error
    for name, value in stored.items():
        name = plain_name(name).removeprefix("model.")
        for old, new in _RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if name not in _UNUSED and not name.endswith("rotary_emb.inv_freq"):
            yield name, value


def _of_target(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return the target's weight that a draft shares; raise ExportError if it is missing."""
    where = f"the draft at {checkpoint.folder} has no {name} and needs that of its target"
    if checkpoint.target_folder is None:
        raise ExportError(f"{where}; export both together, with --target and --draft")
    names = _OF_TARGET[name]
    with open_weights(checkpoint.target_folder) as readers:
        for candidate in names:
            if candidate in readers:
                weight: Tensor = readers[candidate][:]
                return weight
    raise ExportError(
        f"{where}, but {checkpoint.target_folder} has no {names[0]} in safetensors; copy the "
        "weight into the draft's checkpoint"
    )


def _check(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], shapes: Mapping[str, Any]
) -> None:
    """Raise ExportError unless names and shapes of the weights are the module's."""
    where = f"the draft at {checkpoint.folder}"
    if missing := sorted(shapes.keys() - weights.keys()):
        raise ExportError(
            f"{where} lacks {len(missing)} weights, the first is {missing[0]}; the checkpoint is "
            "incomplete, copy or download it again"
        )
    if unknown := sorted(weights.keys() - shapes.keys()):
        raise ExportError(
            f"{where} has {len(unknown)} weights that this version does not support, the first is "
            f"{unknown[0]}; choose another checkpoint"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ExportError(
                f"weight {name} of {where} has shape {tuple(weights[name].shape)}, expected "
                f"{shape} by its config and target; give the target that it was trained for"
            )


def _check_tokens(checkpoint: Checkpoint, d2t: Tensor, t2d: Tensor | None) -> None:
    """Raise ExportError unless d2t names distinct tokens of the target, and t2d names the same."""
    num_tokens = checkpoint.vocab_size
    tokens = torch.arange(len(d2t)) + d2t
    is_named = torch.zeros(num_tokens, dtype=torch.bool)
    if tokens.min() >= 0 and tokens.max() < num_tokens:
        is_named[tokens] = True
    if is_named.sum() != len(d2t):
        raise ExportError(
            f"d2t of the draft at {checkpoint.folder} maps {len(d2t)} tokens to "
            f"{int(is_named.sum())} different ones below {num_tokens}; expected differences, "
            "target id = draft id + d2t"
        )
    if t2d is not None and not torch.equal(t2d.bool(), is_named):
        raise ExportError(
            f"d2t and t2d of the draft at {checkpoint.folder} name different tokens; copy or "
            "download the checkpoint again"
        )
