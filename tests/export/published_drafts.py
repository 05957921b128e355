"""Drafts that read features as they are published, in plain torch: one sequence, without a cache.

EAGLE-3 is written from the public code of EAGLE, SGLang, vLLM and the speculators library; heads
for multi-token prediction from that of SGLang, vLLM and transformers: what they have in common.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.export.feature_checkpoints import LAYER
from tests.export.mtp_checkpoints import LAYOUTS

_LATENT_EPS = 1e-6


def drafted_logits(embeddings, given, step):
    """Return (n, V) logits after tokens 1 to n of a sequence, given features of tokens 0, 1, ...

    embeddings: (n, H) of tokens 1 to n. given: features of the target, for fewer tokens: a later
    token is drafted with the draft's own feature of the token before. step: from embeddings and
    features, one each a token, to the logits after the last token and its own feature.
    """
    features, rows = list(given), []
    for length in range(1, len(embeddings) + 1):
        logits, own = step(embeddings[:length], torch.stack(features[:length]))
        rows.append(logits)
        if length >= len(given):
            features.append(own)
    return torch.stack(rows)


def normed(rows, weight, eps):
    return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated_rows(rows, theta, size=None, *, is_interleaved=False):
    """Rotate pairs of the first ``size`` of D numbers of row p by p * theta^(-2i/size)."""
    size = size or rows.shape[-1]
    half = (size + 1) // 2
    frequencies = theta ** (-2 * torch.arange(half) / size)
    angles = torch.arange(len(rows))[:, None, None] * frequencies
    turned, others = rows[..., : 2 * half], rows[..., 2 * half :]
    first, second = turned[..., :half], turned[..., half:]
    if is_interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, others], dim=-1)


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


class Eagle3:
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
        """Return ``drafted_logits`` of (n + 1,) tokens; target_features: (>= num_given, width)."""

        def step(embeddings, features):
            hidden = self._layer(embeddings, features)[-1]
            own = self._norm(hidden, "norm.weight")
            logits = self._spread(self.weights["lm_head.weight"] @ own)
            return logits, own if self.content.get("norm_output") else hidden

        embeddings = self.weights["embed_tokens.weight"][tokens[1:]]
        given = [self._project(target_features[i]) for i in range(num_given)]
        return drafted_logits(embeddings, given, step)

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
        own = self._norm(features, LAYER + "hidden_norm.weight")
        residual = own if self.content.get("norm_before_residual") else features
        both = torch.cat([self._norm(embeddings, LAYER + "input_layernorm.weight"), own], dim=-1)
        hidden = residual + self._attention(both)
        rows = self._norm(hidden, LAYER + "post_attention_layernorm.weight")
        gate = F.silu(self._linear(rows, "mlp.gate_proj")) * self._linear(rows, "mlp.up_proj")
        return hidden + self._linear(gate, "mlp.down_proj")

    def _attention(self, rows):
        dim = self.layer["head_dim"]
        query, key, value = (
            self._linear(rows, f"self_attn.{name}_proj").view(len(rows), -1, dim) for name in "qkv"
        )
        if LAYER + "self_attn.q_norm.weight" in self.weights:
            query = self._norm(query, LAYER + "self_attn.q_norm.weight")
            key = self._norm(key, LAYER + "self_attn.k_norm.weight")
        theta = self.layer["rope_theta"]
        query, key = rotated_rows(query, theta), rotated_rows(key, theta)
        attended = attended_rows(query, key, value, dim**-0.5).flatten(1)
        return self._linear(attended, "self_attn.o_proj")

    def _linear(self, rows, name):
        return F.linear(
            rows, self.weights[f"{LAYER}{name}.weight"], self.weights.get(f"{LAYER}{name}.bias")
        )

    def _norm(self, rows, name):
        return normed(rows, self.weights[name], self.layer["rms_norm_eps"])

    def _spread(self, logits):
        if "d2t" not in self.weights:
            return logits
        spread = torch.full((self.vocab_size,), -torch.inf)
        spread[torch.arange(len(logits)) + self.weights["d2t"]] = logits
        return spread


class MtpHead:
    """The head for multi-token prediction of a checkpoint of a family."""

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
        """Return ``drafted_logits`` of (n + 1,) tokens; target_features: (>= num_given, H)."""

        def step(embeddings, features):
            given = self._norm(features, self._own("hnorm"))
            both = torch.cat([embeddings, given], dim=-1)
            hidden = self._layer(both @ self._own("eh_proj").T)
            own = self._norm(hidden, self._own("norm"))[-1]
            return self.head @ own, own

        embeddings = self._norm(self.embedding[tokens[1:]], self._own("enorm"))
        return drafted_logits(embeddings, target_features[:num_given], step)

    def _layer(self, hidden):
        attend = {"m": self._windowed, "d": self._latent, "g": self._latent}
        attention = attend.get(self.kind[0], self._gated)
        hidden = hidden + attention(self._norm(hidden, self._of_layer("input_layernorm")))
        rows = self._norm(hidden, self._of_layer("post_attention_layernorm"))
        is_sparse = f"{self.layer_start}mlp.gate.weight" in self.weights
        return hidden + (self._experts(rows) if is_sparse else self._mlp(rows, "mlp"))

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
        return normed(rows, weight + self.is_centered, eps)

    def _rotated(self, rows, **order):
        rope = self.config["rope_parameters"]
        rope = rope.get("sliding_attention", rope)
        size = int(rows.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        return rotated_rows(rows, rope["rope_theta"], size, **order)
