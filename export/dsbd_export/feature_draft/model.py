"""Feature draft as a torch module, for training and for the capture of its graph.

    x = [input_layernorm(embedding of the token), hidden_norm(feature of the token before)]
    h = feature + attention(x)           the feature after its norm with ``norm_before_residual``
    own feature = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(own feature))

``fc`` projects a feature of the target to the draft's width, which an own feature already has.
Logits are over the draft's vocabulary; ``target_logits`` spreads them over the target's.
"""

from collections.abc import Callable
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

from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.feature_draft.config import FeatureDraftConfig
from dsbd_export.parts.draft_vocabulary import spread

_ATTENTIONS: dict[str, Callable[..., Any]] = {"llama": LlamaAttention, "qwen3": Qwen3Attention}


class FeatureLayer(nn.Module):
    """The transformer layer: it attends with an embedding and a feature, concatenated."""

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
            layer.mlp_bias = False  # of Qwen3, whose MLP is Llama's without biases
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
        self.layers = nn.ModuleList([FeatureLayer(features)])  # the published name
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        self.norm = LlamaRMSNorm(size, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, features.draft_vocab_size, bias=False)
        if features.ties_head:
            self.lm_head.weight = self.embed_tokens.weight
        # Difference from each of its tokens to the target's.
        self.register_buffer("d2t", torch.zeros(features.draft_vocab_size, dtype=torch.int64))

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head."""
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
        num_own = self.features.draft_vocab_size
        if num_own == self.config.vocab_size and not self.d2t.any():
            return None
        d2t: Tensor = self.d2t
        return torch.arange(num_own, device=d2t.device) + d2t
