"""Heads for multi-token prediction as they are published, in plain torch: one sequence, no cache.

Written from the public code of SGLang, vLLM and transformers, of which it is the common part.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.export.mtp_checkpoints import LAYOUTS

_LATENT_EPS = 1e-6


class Reference:
    """The head of a checkpoint of a family."""

    def __init__(self, family, folder: Path):
        content = json.loads((folder / "config.json").read_text())
        self.config = content.get("text_config", content)
        self.is_centered = family.startswith("qwen")  # a norm's weight is 1 + its stored one
        stored = {}
        for file in folder.glob("*.safetensors"):
            stored |= load_file(file)
        start, layer_start, _, names = LAYOUTS[family]
        self.weights = {name: value.float() for name, value in stored.items()}
        self.start, self.layer_start = start, layer_start
        self.own_names, self.kind = names, family
        places = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
        [self.embedding] = (self.weights[name] for name in places if name in self.weights)
        self.head = self.weights.get("lm_head.weight", self.embedding)

    def logits(self, tokens, target_features, num_given):
        """Return (n, V) logits after tokens 1 to n of a sequence, given features of tokens 0 to n.

        tokens: (n + 1,) int64. target_features: (>= num_given, H). Token i + 1 is drafted with the
        target's feature of token i for i < num_given, with the head's own from then on.
        """
        embeddings = self._norm(self.embedding[tokens[1:]], self._own("enorm"))
        features, rows = list(target_features[:num_given]), []
        for length in range(1, len(tokens)):
            given = self._norm(torch.stack(features[:length]), self._own("hnorm"))
            both = torch.cat([embeddings[:length], given], dim=-1)
            hidden = self._layer(both @ self._own("eh_proj").T)
            own = self._norm(hidden, self._own("norm"))[-1]
            rows.append(self.head @ own)
            if length >= num_given:
                features.append(own)
        return torch.stack(rows)

    def _layer(self, hidden):
        attend = {"m": self._windowed, "d": self._latent, "g": self._latent}
        attention = attend.get(self.kind[0], self._gated)
        hidden = hidden + attention(self._norm(hidden, self._of_layer("input_layernorm")))
        normed = self._norm(hidden, self._of_layer("post_attention_layernorm"))
        is_sparse = f"{self.layer_start}mlp.gate.weight" in self.weights
        return hidden + (self._experts(normed) if is_sparse else self._mlp(normed, "mlp"))

    def _gated(self, rows):
        """Qwen3.5 and Qwen3-Next: normalized queries and keys, and a gate for each output."""
        dim = self.config["head_dim"]
        query, gate = self._heads(rows, "q", 2 * dim).chunk(2, dim=-1)
        query = self._rotated(self._norm(query, self._of_layer("self_attn.q_norm")))
        key = self._heads(rows, "k", dim)
        key = self._rotated(self._norm(key, self._of_layer("self_attn.k_norm")))
        attended = attended_rows(query, key, self._heads(rows, "v", dim), dim**-0.5)
        return self._linear((attended * gate.sigmoid()).flatten(1), "self_attn.o_proj")

    def _windowed(self, rows):
        """MiMo-V2-Flash: a window, a sink for each head, scaled values."""
        config, dim = self.config, self.config["head_dim"]
        attended = attended_rows(
            self._rotated(self._heads(rows, "q", dim)),
            self._rotated(self._heads(rows, "k", dim)),
            self._heads(rows, "v", config["v_head_dim"]) * config["attention_value_scale"],
            dim**-0.5,
            config["sliding_window"],
            self.weights[f"{self.layer_start}self_attn.attention_sink_bias"],
        )
        return self._linear(attended.flatten(1), "self_attn.o_proj")

    def _latent(self, rows):
        """DeepSeek-V3 and GLM-4-MoE-Lite: keys and values of all heads from one latent."""
        config = self.config
        plain, rotary = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        latent = self._linear(rows, "self_attn.q_a_proj")
        latent = self._norm(latent, self._of_layer("self_attn.q_a_layernorm"), _LATENT_EPS)
        query = self._linear(latent, "self_attn.q_b_proj").view(len(rows), -1, plain + rotary)
        latent, key = self._linear(rows, "self_attn.kv_a_proj_with_mqa").split(
            [config["kv_lora_rank"], rotary], dim=-1
        )
        latent = self._norm(latent, self._of_layer("self_attn.kv_a_layernorm"), _LATENT_EPS)
        expanded = self._linear(latent, "self_attn.kv_b_proj")
        expanded = expanded.view(len(rows), query.shape[1], plain + config["v_head_dim"])
        rotated = self._rotated(key[:, None], is_interleaved=config["rope_interleave"])
        key = torch.cat([expanded[..., :plain], rotated.expand(-1, query.shape[1], -1)], dim=-1)
        rotated = self._rotated(query[..., plain:], is_interleaved=config["rope_interleave"])
        query = torch.cat([query[..., :plain], rotated], dim=-1)
        attended = attended_rows(query, key, expanded[..., plain:], (plain + rotary) ** -0.5)
        return self._linear(attended.flatten(1), "self_attn.o_proj")

    def _experts(self, rows):
        scores, config = rows @ self._of_layer("mlp.gate").T, self.config
        if self.is_centered:
            scores = scores.softmax(-1)
            chosen = scores.topk(config["num_experts_per_tok"]).indices
            scale, shared = 1.0, self._mlp(rows, "mlp.shared_expert")
            shared = shared * self._linear(rows, "mlp.shared_expert_gate").sigmoid()
        else:
            scores = scores.sigmoid()
            bias = self.weights[f"{self.layer_start}mlp.gate.e_score_correction_bias"]
            chosen = (scores + bias).topk(config["num_experts_per_tok"]).indices
            scale, shared = config["routed_scaling_factor"], self._mlp(rows, "mlp.shared_experts")
        shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        shares = scale * shares / shares.sum(-1, keepdim=True)
        outputs = [self._mlp(rows, f"mlp.experts.{each}") for each in range(scores.shape[1])]
        return shared + sum(shares[:, [i]] * output for i, output in enumerate(outputs))

    def _mlp(self, rows, name):
        gate = F.silu(self._linear(rows, f"{name}.gate_proj"))
        return self._linear(gate * self._linear(rows, f"{name}.up_proj"), f"{name}.down_proj")

    def _heads(self, rows, name, width):
        return self._linear(rows, f"self_attn.{name}_proj").view(len(rows), -1, width)

    def _linear(self, rows, name):
        return rows @ self._of_layer(name).T

    def _own(self, name):
        return self.weights[f"{self.start}{self.own_names.get(name, name)}.weight"]

    def _of_layer(self, name):
        return self.weights[f"{self.layer_start}{self.own_names.get(name, name)}.weight"]

    def _norm(self, rows, weight, eps=None):
        eps = self.config["rms_norm_eps"] if eps is None else eps
        normed = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
        return normed * (weight + self.is_centered)

    def _rotated(self, rows, *, is_interleaved=False):
        """Rotate pairs of the first r of D numbers of row p by p * theta^(-2i/r)."""
        rope = self.config["rope_parameters"]
        rope = rope.get("sliding_attention", rope)
        size = int(rows.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        half = (size + 1) // 2
        frequencies = rope["rope_theta"] ** (-2 * torch.arange(half) / size)
        angles = torch.arange(len(rows))[:, None, None] * frequencies
        turned, others = rows[..., : 2 * half], rows[..., 2 * half :]
        first, second = turned[..., :half], turned[..., half:]
        if is_interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
                others,
            ],
            dim=-1,
        )


def attended_rows(query, key, value, scale, window=None, sinks=None):
    """Return (n, heads, Dv): causal attention; a window counts the row itself."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    places = torch.arange(len(query))
    distances = places[:, None] - places
    is_seen = (distances >= 0) & (distances < (window or len(query)))
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        sink = sinks[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : len(query)]
    return torch.einsum("hij,jhd->ihd", weights, value)
