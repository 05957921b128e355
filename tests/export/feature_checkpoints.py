"""Tiny random EAGLE-3 checkpoints in both published layouts, and targets for them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsbd_export.config import ModelOptions
from dsbd_export.opening import kind_of, open_checkpoint
from scripts.family_checkpoints import VOCAB_SIZE
from tests.export.conftest import SIZES as TARGET_SIZES

HIDDEN, NUM_LAYERS, NUM_DRAFT = TARGET_SIZES["hidden_size"], 7, 120  # layers of the target
WIDTH = 3 * HIDDEN
SIZES = {
    **{name: TARGET_SIZES[name] for name in ("hidden_size", "intermediate_size")},
    **{name: TARGET_SIZES[name] for name in ("num_attention_heads", "num_key_value_heads")},
    "num_hidden_layers": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
LLAMA = {"model_type": "llama", **SIZES}
LAYER = "layers.0."


def random_weights(vocab_size, num_draft, width, sizes=SIZES, seed=0, **has):
    """Return weights by the names of the speculators library; ``has``: optional parts."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, key = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=rng) * columns**-0.5

    def scales(size):
        return 0.5 + torch.rand(size, generator=rng)

    weights = {
        "fc.weight": matrix(hidden, width),
        f"{LAYER}self_attn.q_proj.weight": matrix(query, 2 * hidden),
        f"{LAYER}self_attn.k_proj.weight": matrix(key, 2 * hidden),
        f"{LAYER}self_attn.v_proj.weight": matrix(key, 2 * hidden),
        f"{LAYER}self_attn.o_proj.weight": matrix(hidden, query),
        f"{LAYER}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{LAYER}mlp.up_proj.weight": matrix(inner, hidden),
        f"{LAYER}mlp.down_proj.weight": matrix(hidden, inner),
        f"{LAYER}input_layernorm.weight": scales(hidden),
        f"{LAYER}hidden_norm.weight": scales(hidden),
        f"{LAYER}post_attention_layernorm.weight": scales(hidden),
        "norm.weight": scales(hidden),
        "embed_tokens.weight": matrix(vocab_size, hidden),
        "lm_head.weight": 3 * matrix(num_draft, hidden),
    }
    if has.get("qk_norm"):
        weights |= {f"{LAYER}self_attn.{name}_norm.weight": scales(dim) for name in "qk"}
    if has.get("bias"):
        sizes_by_name = {"q": query, "k": key, "v": key, "o": hidden}
        weights |= {
            f"{LAYER}self_attn.{name}_proj.bias": scales(size) - 1
            for name, size in sizes_by_name.items()
        }
    if has.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": scales(width // 3) for i in range(3)}
    if has.get("norm_before_fc"):
        weights["input_norm.weight"] = scales(width)
    if num_draft < vocab_size:
        tokens = torch.randperm(vocab_size, generator=rng)[:num_draft].sort().values
        weights["d2t"] = tokens - torch.arange(num_draft)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        weights["t2d"][tokens] = True
    return weights


def write_flat(folder: Path, weights, vocab_size, **config):
    """Write SGLang's layout."""
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(weights["lm_head.weight"]) if "lm_head.weight" in weights else None,
        "tie_word_embeddings": False,
        **config,
    }
    renamed = {name.replace(LAYER, "midlayer."): value for name, value in weights.items()}
    return _write(folder, content, renamed)


def write_library(folder: Path, weights, vocab_size, layer=None, **config):
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(weights["lm_head.weight"]),
        "norm_before_residual": False,
        "transformer_layer_config": {**LLAMA, "vocab_size": vocab_size, **(layer or {})},
        **config,
    }
    return _write(folder, content, weights)


def _write(folder, content, weights):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors"
    )
    return folder


def opened(target_folder, draft_folder, **options):
    options = ModelOptions(**options)
    target, draft = (
        open_checkpoint(role, folder, options)
        for role, folder in (("target", target_folder), ("draft", draft_folder))
    )
    return options, *kind_of(draft).paired(target, draft, lambda _: None)


def written(tmp_path, write, parts, left_out=(), config=None):
    parts = {"num_draft": NUM_DRAFT, **parts}
    weights = random_weights(VOCAB_SIZE, width=WIDTH, **parts)
    stored = {name: value for name, value in weights.items() if name not in left_out}
    return write(tmp_path / "checkpoint", stored, VOCAB_SIZE, **(config or {}))
