"""A tiny random checkpoint of every family that the export supports, written in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedConfig

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_config import model_class_of

VOCAB_SIZE = 300
WINDOW = 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SIZES: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,  # heads of 16, the smallest that TensorRT has fused kernels for
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GROUPED: dict[str, Any] = {**_SIZES, "intermediate_size": 80, "num_key_value_heads": 2}
_GPT2_SIZES = {**_COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_MIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1] * 8,
    "long_factor": [4.0] * 8,
}
_OTHER_PART: dict[str, Any] = {  # fields of many encoders for pictures or sound
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "depth": 1,
    "num_heads": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 1,
    "encoder_ffn_dim": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


@dataclass(frozen=True, kw_only=True)
class FamilyCheckpoint:
    """One row: a model family and its config.

    Attributes:
        family: row of dsbd_export's table, the ``model_type`` of the config.
        config: name of the config class in transformers.
        arguments: arguments of that class.
        max_context: option of the export; None: the checkpoint's own context.
        is_quick: whether it is part of every run of the tests; False: only of the long form.
    """

    family: str
    config: str
    arguments: dict[str, Any]
    max_context: int | None = None
    is_quick: bool = True


def _row(
    family: str,
    config: str,
    sizes: dict[str, Any],
    *,
    max_context: int | None = None,
    is_quick: bool = True,
    **more: Any,
) -> FamilyCheckpoint:
    return FamilyCheckpoint(
        family=family,
        config=config,
        arguments={**sizes, **more},
        max_context=max_context,
        is_quick=is_quick,
    )


def _composite(
    family: str,
    config: str,
    text: str,
    is_quick: bool = False,
    other: str = "vision_config",
    whole: dict[str, Any] | None = None,
    **more: Any,
) -> FamilyCheckpoint:
    """Return the row of a composite model; ``more``: fields of its text part, of type ``text``."""
    arguments = {
        **(whole or {}),
        "text_config": {"model_type": text, **_GROUPED, **more},
        other: _OTHER_PART,
        "tie_word_embeddings": False,
    }
    return FamilyCheckpoint(family=family, config=config, arguments=arguments, is_quick=is_quick)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    """Return rotary positions in rows for time, height and width."""
    return _rope("default", mrope_section=list(section), **more)


_LLAMA3: dict[str, Any] = {
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_HEADS = {**_GROUPED, "num_key_value_heads": _GROUPED["num_attention_heads"]}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
}
_DELTA_RULE = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
_READERS: dict[str, Any] = {
    **_COMMON,
    "pad_token_id": 2,
    "decoder_start_token_id": 1,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
    "scale_embedding": True,
}
_T5: dict[str, Any] = {
    **_COMMON,
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "n_positions": 256,
}
SOURCE_READERS: dict[str, FamilyCheckpoint] = {  # encoder-decoders
    "marian": _row("marian", "MarianConfig", {**_READERS, "decoder_start_token_id": 2}),
    "bart": _row("bart", "BartConfig", _READERS, is_quick=False),
    "mbart": _row("mbart", "MBartConfig", _READERS, is_quick=False),
    "pegasus": _row("pegasus", "PegasusConfig", _READERS, is_quick=False),
    "m2m_100": _row("m2m_100", "M2M100Config", _READERS),
    "t5": _row("t5", "T5Config", _T5),
    "flan-t5": _row(
        "t5",
        "T5Config",
        _T5,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        is_quick=False,
    ),
    "mt5": _row("mt5", "MT5Config", _T5, feed_forward_proj="gated-gelu", is_quick=False),
    "umt5": _row("umt5", "UMT5Config", _T5, feed_forward_proj="gated-gelu", is_quick=False),
}

FAMILY_CHECKPOINTS: dict[str, FamilyCheckpoint] = {
    "llama": _row("llama", "LlamaConfig", _GROUPED),
    "llama-linear": _row("llama", "LlamaConfig", _GROUPED, **_rope("linear", factor=2.0)),
    "llama-llama3": _row("llama", "LlamaConfig", _GROUPED, **_rope("llama3", **_LLAMA3)),
    "llama-yarn": _row("llama", "LlamaConfig", _GROUPED, **_rope("yarn", factor=2.0)),
    "llama-dynamic": _row("llama", "LlamaConfig", _GROUPED, **_rope("dynamic", factor=2.0)),
    "mistral": _row("mistral", "MistralConfig", _GROUPED, sliding_window=WINDOW),
    "mixtral": _row("mixtral", "MixtralConfig", _GROUPED, num_local_experts=4),
    "mixtral-window": _row(
        "mixtral", "MixtralConfig", _GROUPED, num_local_experts=4, sliding_window=WINDOW
    ),
    "qwen2": _row("qwen2", "Qwen2Config", _GROUPED, use_sliding_window=True, **_MIXED),
    "qwen2_moe": _row(
        "qwen2_moe",
        "Qwen2MoeConfig",
        _GROUPED,
        **_EXPERTS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
    ),
    "qwen3": _row("qwen3", "Qwen3Config", _GROUPED, head_dim=16),
    "qwen3_moe": _row(
        "qwen3_moe", "Qwen3MoeConfig", _GROUPED, **_EXPERTS, head_dim=16, moe_intermediate_size=32
    ),
    "gemma": _row("gemma", "GemmaConfig", _GROUPED, head_dim=16),
    "gemma2": _row("gemma2", "Gemma2Config", _GROUPED, **_MIXED, head_dim=16),
    "gemma3": _row("gemma3_text", "Gemma3TextConfig", _GROUPED, **_MIXED, head_dim=16),
    "phi": _row("phi", "PhiConfig", {**_SIZES, "intermediate_size": 80}),
    "phi3": _row("phi3", "Phi3Config", _GROUPED, sliding_window=WINDOW),
    "phi3-longrope": _row(
        "phi3",
        "Phi3Config",
        _GROUPED,
        original_max_position_embeddings=192,
        rope_parameters=_LONGROPE,
    ),
    "opt": _row("opt", "OPTConfig", _SIZES, ffn_dim=80, word_embed_proj_dim=64),
    "gpt2": _row("gpt2", "GPT2Config", _GPT2_SIZES),
    "gpt_neox": _row("gpt_neox", "GPTNeoXConfig", {**_SIZES, "intermediate_size": 80}),
    "gpt_bigcode": _row("gpt_bigcode", "GPTBigCodeConfig", _GPT2_SIZES),
    "gptj": _row("gptj", "GPTJConfig", _GPT2_SIZES, rotary_dim=8),
    "codegen": _row("codegen", "CodeGenConfig", _GPT2_SIZES, rotary_dim=8, n_ctx=256),
    "stablelm": _row(
        "stablelm", "StableLmConfig", _GROUPED, **_rope("default", partial_rotary_factor=0.5)
    ),
    "starcoder2": _row("starcoder2", "Starcoder2Config", _GROUPED, sliding_window=WINDOW),
    "olmo2": _row("olmo2", "Olmo2Config", _GROUPED),
    "olmo3": _row("olmo3", "Olmo3Config", _GROUPED, **_MIXED),
    "olmoe": _row("olmoe", "OlmoeConfig", _GROUPED, **_EXPERTS),
    "smollm3": _row("smollm3", "SmolLM3Config", _GROUPED, no_rope_layers=[1, 0]),
    "granite": _row("granite", "GraniteConfig", _GROUPED, **_GRANITE),
    "granitemoe": _row("granitemoe", "GraniteMoeConfig", _GROUPED, **_GRANITE, num_local_experts=4),
    "cohere": _row("cohere", "CohereConfig", _GROUPED),
    "cohere2": _row("cohere2", "Cohere2Config", _GROUPED, **_MIXED),
    "exaone4": _row("exaone4", "Exaone4Config", _GROUPED, **_MIXED),
    "glm4": _row("glm4", "Glm4Config", _GROUPED, head_dim=16),
    "nemotron": _row("nemotron", "NemotronConfig", _GROUPED),
    "gemma4-e2b": _row(
        "gemma4_text",
        "Gemma4TextConfig",
        _GROUPED,
        **_SHARING,
        global_head_dim=32,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
    ),
    "gemma4-e4b": _composite(
        "gemma4", "Gemma4Config", "gemma4_text", **_SHARING, global_head_dim=32
    ),
    "gemma4-12b": _composite(
        "gemma4_unified",
        "Gemma4UnifiedConfig",
        "gemma4_unified_text",
        True,
        **_MIXED,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
    ),
    "gemma3n": _row(
        "gemma3n_text",
        "Gemma3nTextConfig",
        _GROUPED,
        is_quick=False,
        **_SHARING,
        intermediate_size=[48] * 4,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "minicpm3": _row("minicpm3", "MiniCPM3Config", _HEADS, **_LATENT, v_head_dim=24),
    "youtu": _row("youtu", "YoutuConfig", _HEADS, is_quick=False, **_LATENT, v_head_dim=16),
    "diffllama": _row("diffllama", "DiffLlamaConfig", _GROUPED),
    "deepseek_v2": _row(
        "deepseek_v2",
        "DeepseekV2Config",
        _HEADS,
        **_LATENT,
        **_ROUTED,
        **_rope(
            "yarn",
            factor=2.0,
            original_max_position_embeddings=64,
            mscale=0.707,
            mscale_all_dim=0.5,
        ),
        v_head_dim=16,
        head_dim=8,
    ),
    "deepseek_v3": _row(
        "deepseek_v3",
        "DeepseekV3Config",
        _HEADS,
        **_LATENT,
        **_ROUTED,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
    ),
    "glm4_moe_lite": _row(
        "glm4_moe_lite",
        "Glm4MoeLiteConfig",
        _HEADS,
        is_quick=False,
        **_LATENT,
        **_ROUTED,
        v_head_dim=16,
    ),
    "falcon-old": _row("falcon", "FalconConfig", _SIZES, bias=True, parallel_attn=True),
    "falcon-new": _row(
        "falcon", "FalconConfig", _SIZES, new_decoder_architecture=True, num_kv_heads=2
    ),
    "gpt_oss": _row(
        "gpt_oss",
        "GptOssConfig",
        _GROUPED,
        **_MIXED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=4,  # all experts: with random weights fp16 would choose different ones
        **_rope("yarn", factor=2.0, original_max_position_embeddings=64, truncate=False),
    ),
    "mimo_v2_flash": _row(
        "mimo_v2_flash",
        "MiMoV2FlashConfig",
        _GROUPED,
        is_quick=False,
        **_MIXED,
        **_ROUTED,
        head_dim=16,
        v_head_dim=16,
    ),
    "granite_swa": _row("granite_swa", "GraniteSWAConfig", _GROUPED, **_MIXED, **_GRANITE),
    "phi3-longrope-long": _row(
        "phi3",
        "Phi3Config",
        _GROUPED,
        max_context=256,
        original_max_position_embeddings=64,
        rope_parameters=_LONGROPE,
    ),
    "lfm2": _row("lfm2", "Lfm2Config", _GROUPED, **_CONVOLUTION),
    "lfm2_moe": _row(
        "lfm2_moe",
        "Lfm2MoeConfig",
        _GROUPED,
        **_CONVOLUTION,
        **_EXPERTS,
        moe_intermediate_size=32,
        num_dense_layers=1,
        is_quick=False,
    ),
    "lfm3": _row(
        "lfm3",
        "Lfm3Config",
        _GROUPED,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=WINDOW,
        is_quick=False,
    ),
    "qwen3_5": _row("qwen3_5_text", "Qwen3_5TextConfig", _GROUPED, **_DELTA_RULE, head_dim=16),
    "qwen3_next": _row(
        "qwen3_next",
        "Qwen3NextConfig",
        _GROUPED,
        **_DELTA_RULE,
        **_EXPERTS,
        head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        is_quick=False,
    ),
    "olmo_hybrid": _row("olmo_hybrid", "OlmoHybridConfig", _GROUPED, **_DELTA_RULE, is_quick=False),
    "granite_hybrid": _row(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        _GROUPED,
        **_MAMBA2,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=0,
        shared_intermediate_size=48,
    ),
    "falcon_h1": _row(
        "falcon_h1", "FalconH1Config", _GROUPED, **_MAMBA2, mamba_d_ssm=128, is_quick=False
    ),
    "nemotron_h": _row(
        "nemotron_h",
        "NemotronHConfig",
        _GROUPED,
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=12,
        n_groups=2,
        chunk_size=16,
        head_dim=16,
        is_quick=False,
    ),
    "zamba2": _row(
        "zamba2",
        "Zamba2Config",
        _GROUPED,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_d_state=12,
        chunk_size=16,
        is_quick=False,
    ),
    "mamba2": _row(
        "mamba2",
        "Mamba2Config",
        {name: size for name, size in _SIZES.items() if name != "num_attention_heads"},
        num_heads=8,
        head_dim=16,
        state_size=12,
        n_groups=2,
        chunk_size=16,
        is_quick=False,
    ),
    "qwen3_5-wrapper": _composite(
        "qwen3_5", "Qwen3_5Config", "qwen3_5_text", **_DELTA_RULE, head_dim=16
    ),
    "lfm2_vl": _composite("lfm2_vl", "Lfm2VlConfig", "lfm2", **_CONVOLUTION),
    "bamba": _row(
        "bamba", "BambaConfig", _GROUPED, **_MAMBA2, attn_layer_indices=[1], is_quick=False
    ),
    "qwen2_5_vl": _composite(
        "qwen2_5_vl", "Qwen2_5_VLConfig", "qwen2_5_vl_text", True, **_mrope(4, 2, 2)
    ),
    "gemma3-4b": _composite(
        "gemma3",
        "Gemma3Config",
        "gemma3_text",
        True,
        whole={"image_token_index": 7},  # a token of the vocabulary, like the real one
        head_dim=16,
        **_MIXED,
    ),
    "ministral3": _composite(
        "mistral3",
        "Mistral3Config",
        "ministral3",
        True,
        head_dim=16,
        **_rope("yarn", factor=2.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
    ),
    "mistral3": _composite("mistral3", "Mistral3Config", "mistral", head_dim=16),
    "internvl": _composite("internvl", "InternVLConfig", "qwen3", head_dim=16),
    "llava": _composite("llava", "LlavaConfig", "llama"),
    "llava_onevision": _composite("llava_onevision", "LlavaOnevisionConfig", "qwen2"),
    "lighton_ocr": _composite("lighton_ocr", "LightOnOcrConfig", "qwen3", head_dim=16),
    "glm46v": _composite(
        "glm46v", "Glm46VConfig", "glm4v_text", **_mrope(2, 1, 1, partial_rotary_factor=0.5)
    ),
    "cohere2_vision": _composite(
        "cohere2_vision", "Cohere2VisionConfig", "cohere2", True, logit_scale=0.25, **_MIXED
    ),
    "voxtral": _composite("voxtral", "VoxtralConfig", "llama", other="audio_config"),
}

ONE_OF_EACH = list(  # the first variant of every family
    {row.family: name for name, row in reversed(FAMILY_CHECKPOINTS.items())}.values()
)[::-1]
RECURRENT = (
    *("bamba", "falcon_h1", "granite_hybrid", "mamba2", "nemotron_h", "zamba2"),  # Mamba2
    *("olmo_hybrid", "qwen3_5", "qwen3_5-wrapper", "qwen3_next"),  # gated delta rule
)
CONVOLUTIONAL = ("lfm2", "lfm2_moe", "lfm2_vl", "lfm3")
NOT_EXACT = (
    *RECURRENT,
    *("gemma3n", "gemma4-e2b", "gemma4-e4b"),  # layers that share rows
    *(
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "minicpm3",
        "youtu",
    ),  # values computed from latents
    "diffllama",  # values are two halves of the cached ones
)


def write_family_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint of one row of the table; return its folder."""
    row = {**FAMILY_CHECKPOINTS, **SOURCE_READERS}[name]
    make_config: Callable[..., PreTrainedConfig] = getattr(transformers, row.config)
    with quiet_libraries():
        config = make_config(**row.arguments)
    return write_checkpoint(folder, config, deviation=0.17)


_SLOWER = 4
"""States of recurrences decay slower by the exponential of this than when initialized, so that the
whole path matters."""


def write_checkpoint(folder: Path, config: PreTrainedConfig, deviation: float = 0.2) -> Path:
    """Write a seeded random model with a tokenizer.

    deviation: standard deviation of its matrices, so large that every part of the model matters.
    """
    torch.manual_seed(0)
    with quiet_libraries():
        model = model_class_of(config)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, deviation)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                if name.endswith("A_log"):
                    parameter.sub_(_SLOWER)
        model.half().save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_tokenizer(texts: tuple[str, ...] = ("def read(path): return path",)) -> Tokenizer:
    """Return a byte-level BPE of at most VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer
