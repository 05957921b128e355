"""Why a checkpoint cannot be exported, as far as its config says it; the gate judges the rest."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig

from dsbd_export.families import DEFAULT_FAMILY, FAMILIES
from dsbd_export.layers import MASK_BY_LAYER_TYPE, normalized_config

_BY_LAYER_TYPE = {
    "linear_attention": "keeps a recurrent state, which a tree of tokens cannot share",
    "hybrid": "keeps a recurrent state, which a tree of tokens cannot share",
    "hybrid_sliding": "keeps a recurrent state, which a tree of tokens cannot share",
    "conv": "keeps the last inputs of a convolution, which a tree of tokens cannot share",
    "chunked_attention": "needs a mask of chunks, the graph has none",
}
_NEEDED = ("num_layers", "num_attention_heads", "hidden_size", "vocab_size")


def refusal_of(config: PreTrainedConfig) -> str | None:
    """Return why a checkpoint with this config cannot come out right, None when it may."""
    return next(_refusals(config), None)


def _refusals(config: PreTrainedConfig) -> Iterator[str]:
    if refusal := FAMILIES.get(config.model_type, DEFAULT_FAMILY).refusal:
        yield refusal
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder, a decoder-only model is needed"
    if config.get_text_config() is not config:
        yield "it is a composite of several models, a text-only causal model is needed"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are already quantized, a checkpoint in fp32, fp16 or bf16 is needed"
    if getattr(config, "alibi", False):
        yield str(FAMILIES["bloom"].refusal)
    if getattr(config, "kv_lora_rank", None) is not None:
        yield str(FAMILIES["deepseek_v2"].refusal)
    for layer_type in getattr(config, "layer_types", None) or []:
        if layer_type not in MASK_BY_LAYER_TYPE:
            known = f"only {sorted(MASK_BY_LAYER_TYPE)} can be exported"
            yield f"a layer of type {layer_type!r} {_BY_LAYER_TYPE.get(layer_type, known)}"
    for name in _NEEDED:
        if not normalized_config(config).has_attribute(name):
            yield f"its config has no {name} under any known name"
