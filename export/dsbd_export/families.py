"""What differs between model families: one table, and the reasons to refuse a checkpoint.

A family that is not in the table is tried as it is: the hooks of ``forest_graph`` know no
family, and the parity gate judges the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optimum.utils.normalized_config import (
    NormalizedConfig,
    NormalizedConfigManager,
    NormalizedTextConfigWithGQA,
)
from transformers import PreTrainedConfig

from dsbd_runtime.bundle import KVGeometry
from dsbd_runtime.graph import ATTENTION_MASK, ATTENTION_MASK_SLIDING

MASK_BY_LAYER_TYPE = {
    "full_attention": ATTENTION_MASK,
    "sliding_attention": ATTENTION_MASK_SLIDING,
}

_LENGTH_DEPENDENT_ROPE = {
    "dynamic": "its frequencies change with the length of the sequence",
    "longrope": "its frequencies switch at the original context length",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table.

    Attributes:
        refusal: why the family cannot be exported, None when it can.
    """

    refusal: str | None = None


_ALIBI = "its attention adds a bias by distance (ALiBi), which a boolean mask cannot carry"
_LATENT = "its keys and values have different shapes (latent attention)"
_EXPERTS = "its routing to experts has no ONNX form yet"
_SINKS = "its attention sinks have no ONNX form yet"

DEFAULT_FAMILY = Family()
FAMILIES: dict[str, Family] = {
    "bloom": Family(refusal=_ALIBI),
    "deepseek_v2": Family(refusal=_LATENT),
    "deepseek_v3": Family(refusal=_LATENT),
    "gpt_oss": Family(refusal=_SINKS),
    "mixtral": Family(refusal=_EXPERTS),
    "mpt": Family(refusal=_ALIBI),
    "qwen2_moe": Family(refusal=_EXPERTS),
    "qwen3_moe": Family(refusal=_EXPERTS),
}


def refusal_of(config: PreTrainedConfig) -> str | None:
    """Return why a checkpoint with this config cannot come out right, None when it may."""
    return next(_refusals(config), None)


def kv_geometry(config: PreTrainedConfig) -> KVGeometry:
    """Return the shape of the caches, in fp32."""
    normalized = _normalized(config)
    num_heads: int = normalized.num_attention_heads
    head_dim: int | None = getattr(config, "head_dim", None)
    return KVGeometry(
        num_layers=normalized.num_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim or normalized.hidden_size // num_heads,
        dtype="fp32",
    )


def layer_masks(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return for each layer the mask input that it attends with."""
    num_layers: int = _normalized(config).num_layers
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is not None:
        return tuple(MASK_BY_LAYER_TYPE[layer_type] for layer_type in layer_types)
    if getattr(config, "sliding_window", None) is not None:
        return (ATTENTION_MASK_SLIDING,) * num_layers
    return (ATTENTION_MASK,) * num_layers


def _normalized(config: PreTrainedConfig) -> NormalizedConfig:
    """Return optimum's view of a config, which names layers and heads alike in all families."""
    try:
        kind = NormalizedConfigManager.get_normalized_config_class(config.model_type)
    except KeyError:
        kind = NormalizedTextConfigWithGQA  # the names that Llama and most others use
    return kind(config)


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    if refusal := FAMILIES.get(config.model_type, DEFAULT_FAMILY).refusal:
        yield refusal
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder, a decoder-only model is needed"
    if config.get_text_config() is not config:
        yield "it is a composite of several models, a text-only causal model is needed"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are already quantized, a checkpoint in fp32, fp16 or bf16 is needed"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            yield f"rope type {rope_type!r}: {_LENGTH_DEPENDENT_ROPE[rope_type]}"
    for layer_type in getattr(config, "layer_types", None) or []:
        if layer_type not in MASK_BY_LAYER_TYPE:
            yield f"layer type {layer_type!r}, only {sorted(MASK_BY_LAYER_TYPE)} are known"
    for name in ("num_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if not _normalized(config).has_attribute(name):
            yield f"its config has no {name} under any known name"


def _rope_types(rope_parameters: dict[str, Any] | None) -> Iterator[str]:
    """Yield the rope types of a config: one dict, or one dict for each layer type."""
    for key, value in (rope_parameters or {}).items():
        if key == "rope_type":
            yield value
        elif isinstance(value, dict):
            yield from _rope_types(value)
