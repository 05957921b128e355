"""EAGLE-3 drafts as their publishers define them, in plain torch: one sequence, without a cache.

Written from the public code of EAGLE, SGLang, vLLM and the speculators library, of which it is the
common part.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.export.feature_checkpoints import LAYER


class Reference:
    """A published draft; ``norm_before_residual`` and ``norm_output`` as its config says."""

    def __init__(self, folder: Path, vocab_size, **shared):
        content = json.loads((folder / "config.json").read_text())
        self.layer = content.get("transformer_layer_config", content)
        self.content, self.vocab_size = content, vocab_size
        stored = load_file(folder / "model.safetensors")
        self.weights = shared | {
            name.replace("midlayer.", LAYER): value for name, value in stored.items()
        }

    def logits(self, tokens, target_features, num_given):
        """Return (n, V) logits after tokens 1 to n of a sequence, given features of tokens 0 to n.

        tokens: (n + 1,) int64. target_features: (>= num_given, width). Token i + 1 is drafted with
        the target's feature of token i for i < num_given, with the draft's own from then on.
        """
        embeddings = self.weights["embed_tokens.weight"][tokens[1:]]
        features = [self._project(target_features[i]) for i in range(num_given)]
        rows = []
        for length in range(1, len(tokens)):
            given = torch.stack(features[:length])
            hidden = self._layer(embeddings[:length], given)[-1]
            normed = self._norm(hidden, "norm.weight")
            rows.append(self._spread(self.weights["lm_head.weight"] @ normed))
            if length >= num_given:
                features.append(normed if self.content.get("norm_output") else hidden)
        return torch.stack(rows)

    def _project(self, feature):
        if self.content.get("norm_before_fc"):
            feature = self._norm(feature, "input_norm.weight")
        if self.content.get("fc_norm"):
            parts = [
                self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(feature.chunk(3))
            ]
            feature = torch.cat(parts)
        return self.weights["fc.weight"] @ feature

    def _layer(self, embeddings, features):
        normed = self._norm(features, LAYER + "hidden_norm.weight")
        residual = normed if self.content.get("norm_before_residual") else features
        both = torch.cat([self._norm(embeddings, LAYER + "input_layernorm.weight"), normed], dim=-1)
        hidden = residual + self._attention(both)
        normed = self._norm(hidden, LAYER + "post_attention_layernorm.weight")
        gate = F.silu(self._linear(normed, "mlp.gate_proj")) * self._linear(normed, "mlp.up_proj")
        return hidden + self._linear(gate, "mlp.down_proj")

    def _attention(self, rows):
        num_heads, dim = self.layer["num_attention_heads"], self.layer["head_dim"]
        query, key, value = (
            self._linear(rows, f"self_attn.{name}_proj").view(len(rows), -1, dim) for name in "qkv"
        )
        if LAYER + "self_attn.q_norm.weight" in self.weights:
            query = self._norm(query, LAYER + "self_attn.q_norm.weight")
            key = self._norm(key, LAYER + "self_attn.k_norm.weight")
        query, key = self._rotated(query), self._rotated(key)
        repeats = num_heads // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) * dim**-0.5
        is_later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights, value).reshape(len(rows), -1)
        return self._linear(attended, "self_attn.o_proj")

    def _rotated(self, rows):
        """Rotate pairs (i, i + D/2) of row p by p * theta^(-2i/D): the first row stands at 0."""
        half = rows.shape[-1] // 2
        frequencies = self.layer["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(len(rows))[:, None, None] * frequencies
        first, second = rows[..., :half], rows[..., half:]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            dim=-1,
        )

    def _linear(self, rows, name):
        return F.linear(
            rows, self.weights[f"{LAYER}{name}.weight"], self.weights.get(f"{LAYER}{name}.bias")
        )

    def _norm(self, rows, name):
        mean_square = rows.square().mean(-1, keepdim=True)
        return rows / (mean_square + self.layer["rms_norm_eps"]).sqrt() * self.weights[name]

    def _spread(self, logits):
        if "d2t" not in self.weights:
            return logits
        spread = torch.full((self.vocab_size,), -torch.inf)
        spread[torch.arange(len(logits)) + self.weights["d2t"]] = logits
        return spread
