"""Config of a transformers model: refusals, masks of layers, limits of positions."""

from collections.abc import Iterator
from typing import Any

from optimum.utils.normalized_config import (
    NormalizedConfig,
    NormalizedConfigManager,
    NormalizedTextConfigWithGQA,
)
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    PreTrainedConfig,
)

from dsbd_export.checkpoints.families import DEFAULT_FAMILY, FAMILIES
from dsbd_export.checkpoints.quantized_weights import refusal_of_quantization
from dsbd_runtime.parts.attention_rows import ATTENTION_MASK, ATTENTION_MASK_SLIDING

MASK_BY_LAYER_TYPE = {
    "full_attention": ATTENTION_MASK,
    "sliding_attention": ATTENTION_MASK_SLIDING,
    "hybrid": ATTENTION_MASK,  # with a recurrence
    "linear_attention": None,
    "conv": None,
    "mlp": None,
    "moe": None,
}
"""Mask input by type of layer, for the types that can be exported; None: no mask."""

_BY_LAYER_TYPE = {
    "hybrid_sliding": "keeps a state in addition to its rows, which a tree of tokens cannot share",
    "chunked_attention": "needs a mask of chunks, which the graph lacks",
}
_SPEECH_FAMILY = "whisper"
_UNLIMITED = 512  # tokens, if a model has no limit: what most were trained with
_NEEDED = ("num_layers", "hidden_size", "vocab_size")


def reads_sound(config: PreTrainedConfig) -> bool:
    """Return whether the source of a model is sound in a supported form."""
    return bool(config.model_type == _SPEECH_FAMILY)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text part of a composite model, or the whole config."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def model_class_of(config: PreTrainedConfig) -> Any:
    """Return the class of transformers for a config, None if none continues text."""
    if reads_sound(config):
        return MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING[type(config)]
    if config.is_encoder_decoder:
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    multimodal = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    is_composite = (
        text_config(config) is not config
    )  # its causal class may expect the config of the text part
    return multimodal or causal if is_composite else causal or multimodal


def window_within(config: PreTrainedConfig, context_length: int) -> int | None:
    """Return the sliding window of a config, None if no sequence is longer."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if window is not None and window < context_length else None


def layer_masks(config: PreTrainedConfig, window: int | None) -> tuple[str | None, ...]:
    """Return the mask input of each layer, None for a layer without attention."""
    if config.is_encoder_decoder:
        return (ATTENTION_MASK,) * num_decoder_layers(config)
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is None:
        num_layers: int = normalized_config(config).num_layers
        return (ATTENTION_MASK if window is None else ATTENTION_MASK_SLIDING,) * num_layers
    masks = [MASK_BY_LAYER_TYPE[layer_type] for layer_type in layer_types]
    return tuple(ATTENTION_MASK if mask and window is None else mask for mask in masks)


def normalized_config(config: PreTrainedConfig) -> NormalizedConfig:
    """Return optimum's view of a config, with the same names in all families."""
    try:
        kind = NormalizedConfigManager.get_normalized_config_class(config.model_type)
    except KeyError:
        kind = NormalizedTextConfigWithGQA  # the names that Llama and most others use
    return kind(config)


def refusal_of(config: PreTrainedConfig) -> str | None:
    """Return why a checkpoint with this config cannot be exported, None if it may be."""
    if reason := next(_refusals(config), None):
        return reason
    if model_class_of(config) is None and not hasattr(config, "auto_map"):
        return (
            f"transformers has no model class that continues text for {type(config).__name__}, "
            "the config of a part of a model or of a model for another task"
        )
    return None


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    if refusal := FAMILIES.get(config.model_type, DEFAULT_FAMILY).refusal:
        yield refusal
    if config.is_encoder_decoder and model_class_of(config) is None:
        yield (
            "it is an encoder-decoder that reads neither text nor, as Whisper does, sound, or no "
            "class of transformers writes text"
        )
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
            known = f"is not known; {', '.join(sorted(MASK_BY_LAYER_TYPE))} can be exported"
            yield f"a layer of type {layer_type!r} {_BY_LAYER_TYPE.get(layer_type, known)}"
    if config.is_encoder_decoder:
        return
    for name in _NEEDED:
        if not normalized_config(config).has_attribute(name):
            yield f"its config has no {name} under any known name"


def constant_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence with constant frequencies, None if they are always constant."""
    limits = [
        parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        # transformers raises a dynamic base beyond max_position_embeddings, whatever else is given
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


def positions(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return how many tokens of a source, or of a target, a model reads."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return wanted or getattr(config, "n_positions", None) or _UNLIMITED
    return limit if wanted is None else min(limit, wanted)


def target_positions(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return how many tokens of a target a model reads; see ``positions``."""
    own: int | None = getattr(config, "max_target_positions", None)
    if own is None:
        return positions(config, wanted)
    return own if wanted is None else min(own, wanted)


def num_decoder_layers(config: PreTrainedConfig) -> int:
    """Return the number of the decoder's transformer layers, which may not be the encoder's."""
    named = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    found = next((each for each in named if each is not None), None)
    return int(config.num_hidden_layers if found is None else found)


def decoder_vocab_size(config: PreTrainedConfig) -> int:
    """Return the vocabulary size of targets, which may differ from that of sources in Marian."""
    own: int | None = getattr(config, "decoder_vocab_size", None)
    return int(config.vocab_size if own is None else own)
