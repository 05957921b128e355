"""Config of a transformers model: reasons for refusal, caches and masks of layers, rotary limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimum.utils.normalized_config import (
    NormalizedConfig,
    NormalizedConfigManager,
    NormalizedTextConfigWithGQA,
)
from transformers import PreTrainedConfig

from dsbd_export.families import DEFAULT_FAMILY, FAMILIES
from dsbd_export.quantized_weights import refusal_of_quantization
from dsbd_runtime.graph import ATTENTION_MASK, ATTENTION_MASK_SLIDING

MASK_BY_LAYER_TYPE = {
    "full_attention": ATTENTION_MASK,
    "sliding_attention": ATTENTION_MASK_SLIDING,
}

_BY_LAYER_TYPE = {
    "linear_attention": "keeps a recurrent state, which a tree of tokens cannot share",
    "hybrid": "keeps a recurrent state, which a tree of tokens cannot share",
    "hybrid_sliding": "keeps a recurrent state, which a tree of tokens cannot share",
    "conv": "keeps the last inputs of a convolution, which a tree of tokens cannot share",
    "chunked_attention": "needs a mask of chunks, the graph has none",
}
_NEEDED = ("num_layers", "num_attention_heads", "hidden_size", "vocab_size")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of what reads and writes text: the whole, or the part of a composite."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def window_within(config: PreTrainedConfig, context_length: int) -> int | None:
    """Return the sliding window of a config, None where no sequence reaches beyond it."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if window is not None and window < context_length else None


def layer_masks(config: PreTrainedConfig, window: int | None) -> tuple[str, ...]:
    """Return for each layer the mask input that it attends with; ``window`` is that in effect."""
    num_layers: int = normalized_config(config).num_layers
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if window is None:
        return (ATTENTION_MASK,) * num_layers
    if layer_types is not None:
        return tuple(MASK_BY_LAYER_TYPE[layer_type] for layer_type in layer_types)
    return (ATTENTION_MASK_SLIDING,) * num_layers


def normalized_config(config: PreTrainedConfig) -> NormalizedConfig:
    """Return optimum's view of a config, which names layers and heads alike in all families."""
    try:
        kind = NormalizedConfigManager.get_normalized_config_class(config.model_type)
    except KeyError:
        kind = NormalizedTextConfigWithGQA  # the names that Llama and most others use
    return kind(config)


def refusal_of(config: PreTrainedConfig) -> str | None:
    """Return why a checkpoint with this config cannot be exported, None when it may be."""
    return next(_refusals(config), None)


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    if refusal := FAMILIES.get(config.model_type, DEFAULT_FAMILY).refusal:
        yield refusal
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder, a decoder-only model is needed"
        return
    if reason := refusal_of_quantization(config):
        yield reason
    if (text := text_config(config)) is not config:
        yield from _refusals(text)
        return
    if getattr(config, "alibi", False):
        yield str(FAMILIES["bloom"].refusal)
    for layer_type in getattr(config, "layer_types", None) or []:
        if layer_type not in MASK_BY_LAYER_TYPE:
            known = f"only {sorted(MASK_BY_LAYER_TYPE)} can be exported"
            yield f"a layer of type {layer_type!r} {_BY_LAYER_TYPE.get(layer_type, known)}"
    for name in _NEEDED:
        if not normalized_config(config).has_attribute(name):
            yield f"its config has no {name} under any known name"


def constant_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence with constant frequencies, None where no length changes them."""
    limits = [
        parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        # transformers widens a dynamic base from max_position_embeddings on, whatever else is given
        if parameters["rope_type"] == "longrope"
        else config.max_position_embeddings
        for parameters in _rope_parameters(getattr(config, "rope_parameters", None))
        if parameters["rope_type"] in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def _rope_parameters(content: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the rope parameters of a config: one dict, or one dict for each layer type."""
    content = content or {}
    if "rope_type" in content:
        yield content
    for value in content.values():
        if isinstance(value, dict):
            yield from _rope_parameters(value)
