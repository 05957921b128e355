"""What a config says of its layers: the shape of their caches and the masks they read."""

from __future__ import annotations

from optimum.utils.normalized_config import (
    NormalizedConfig,
    NormalizedConfigManager,
    NormalizedTextConfigWithGQA,
)
from transformers import PreTrainedConfig

from dsbd_export.families import DEFAULT_FAMILY, FAMILIES
from dsbd_runtime.bundle import KVGeometry
from dsbd_runtime.graph import ATTENTION_MASK, ATTENTION_MASK_SLIDING

MASK_BY_LAYER_TYPE = {
    "full_attention": ATTENTION_MASK,
    "sliding_attention": ATTENTION_MASK_SLIDING,
}


def kv_geometry(config: PreTrainedConfig, dtype: str) -> KVGeometry:
    """Return the shape of the caches, in the precision ``dtype``."""
    normalized = normalized_config(config)
    num_heads: int = normalized.num_attention_heads
    head_dim: int | None = getattr(config, "head_dim", None)
    num_cache_heads = FAMILIES.get(config.model_type, DEFAULT_FAMILY).num_cache_heads
    if num_cache_heads is None:
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    else:
        num_kv_heads = num_cache_heads(config)
    return KVGeometry(
        num_layers=normalized.num_layers,
        num_heads=num_kv_heads,
        head_dim=head_dim or normalized.hidden_size // num_heads,
        dtype=dtype,
    )


def layer_masks(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return for each layer the mask input that it attends with."""
    num_layers: int = normalized_config(config).num_layers
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is not None:
        return tuple(MASK_BY_LAYER_TYPE[layer_type] for layer_type in layer_types)
    if getattr(config, "sliding_window", None) is not None:
        return (ATTENTION_MASK_SLIDING,) * num_layers
    return (ATTENTION_MASK,) * num_layers


def normalized_config(config: PreTrainedConfig) -> NormalizedConfig:
    """Return optimum's view of a config, which names layers and heads alike in all families."""
    try:
        kind = NormalizedConfigManager.get_normalized_config_class(config.model_type)
    except KeyError:
        kind = NormalizedTextConfigWithGQA  # the names that Llama and most others use
    return kind(config)
