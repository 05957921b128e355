"""Tiny random language models that read sound, with the tokens and settings of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GlmAsrConfig,
    GraniteSpeechConfig,
    GraniteSpeechPlusConfig,
    PreTrainedConfig,
    Qwen2AudioConfig,
)

from scripts.family_checkpoints import write_checkpoint
from scripts.qwen3_asr_checkpoint import write_speech_files

FIRST_SPECIAL = 300
CONTEXT = 512
NUM_MELS = 8
WINDOW_FRAMES = 200  # for kinds with Whisper's windows: two seconds
BLOCK_PAIRS, WINDOW_PAIRS = 20, 15  # as in Granite Speech
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}

_GRANITE_TEMPLATE = """\
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {{- 'USER: ' + message['content'] + '\\n ASSISTANT:' -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- message['content'] + '<|end_of_text|>' -}}
  {%- endif -%}
{%- endfor -%}
"""
"""Like Granite 4.0's template: contents are texts, in which users write the placeholder."""

_PARTS = """\
{%- macro shown(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'audio' -%}{{- SOUND -}}{%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
_GLM_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|' + message.role + '|>\\n' + shown(message.content) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
_CHATML = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + shown(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _with_parts(template: str, sound: str) -> str:
    return _PARTS.replace("SOUND", repr(sound)) + template


@dataclass(frozen=True, kw_only=True)
class SpeechModel:
    """A tiny model.

    config: makes the config, given ids of special tokens. special_tokens: the placeholder, the
    token that ends texts, others.
    """

    config: Callable[[Mapping[str, int]], PreTrainedConfig]
    special_tokens: Sequence[str]
    template: str
    features: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, int]:
        return {name: FIRST_SPECIAL + place for place, name in enumerate(self.special_tokens)}

    @property
    def placeholder(self) -> int:
        return FIRST_SPECIAL


def _granite(tokens: Mapping[str, int], **encoder: Any) -> dict[str, Any]:
    ends = tokens["<|end_of_text|>"]
    sizes = {
        "input_dim": 2 * NUM_MELS,
        "num_layers": 2,
        "hidden_dim": 64,
        "feedforward_mult": 1,
        "num_heads": 2,
        "output_dim": 256,
        "context_size": BLOCK_PAIRS,
        "max_pos_emb": 24,
        "conv_kernel_size": 7,
    }
    joined = 64 * (1 + len(encoder.get("cat_hidden_layers") or ()))
    former = {
        "model_type": "blip_2_qformer",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "encoder_hidden_size": joined,
        "cross_attention_frequency": 1,
    }
    text = {
        **_LLAMA,
        "model_type": "granite",
        "vocab_size": FIRST_SPECIAL + len(tokens),
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
        "pad_token_id": ends,
        "eos_token_id": ends,
        "bos_token_id": ends,
    }
    return {
        "encoder_config": {**sizes, **encoder},
        "projector_config": former,
        "text_config": text,
        "audio_token_index": FIRST_SPECIAL,
        "has_lora_adapter": False,
        "downsample_rate": 5,
        "window_size": WINDOW_PAIRS,
        "tie_word_embeddings": False,
    }


def _text(tokens: Mapping[str, int], kind: str, end: str) -> dict[str, Any]:
    return {
        **_LLAMA,
        "model_type": kind,
        "vocab_size": FIRST_SPECIAL + len(tokens),
        "pad_token_id": tokens[end],
        "eos_token_id": tokens[end],
        "bos_token_id": None,
    }


def _glmasr(tokens: Mapping[str, int]) -> PreTrainedConfig:
    audio = {
        "model_type": "glmasr_encoder",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_mel_bins": NUM_MELS,
        "max_position_embeddings": WINDOW_FRAMES // 2,
    }
    text = _text(tokens, "llama", "<|user|>")
    return GlmAsrConfig(audio_config=audio, text_config=text, audio_token_id=FIRST_SPECIAL)


def _whisper_audio(kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "num_mel_bins": NUM_MELS,
        "max_source_positions": WINDOW_FRAMES // 2,
    }


def _qwen2_audio(tokens: Mapping[str, int]) -> PreTrainedConfig:
    return Qwen2AudioConfig(
        audio_config=_whisper_audio("qwen2_audio_encoder"),
        text_config=_text(tokens, "qwen2", "<|im_end|>"),
        audio_token_index=FIRST_SPECIAL,
    )


_WINDOWS = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": NUM_MELS,
    "chunk_length": WINDOW_FRAMES // 100,
}
_GRANITE_FEATURES = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "n_mels": NUM_MELS}
_GRANITE_TOKENS = ("<|audio|>", "<|end_of_text|>")
_SPELLING_STEPS = 20
READ_LAYERS = [0, 1, 2]  # for the tiny Granite Speech Plus; 1 is the middle layer
MODELS = {
    "granite_speech": SpeechModel(
        config=lambda tokens: GraniteSpeechConfig(**_granite(tokens)),
        special_tokens=_GRANITE_TOKENS,
        template=_GRANITE_TEMPLATE,
        features=_GRANITE_FEATURES,
    ),
    "granite_speech_plus": SpeechModel(
        config=lambda tokens: GraniteSpeechPlusConfig(
            **_granite(tokens, num_layers=3, cat_hidden_layers=READ_LAYERS)
        ),
        special_tokens=_GRANITE_TOKENS,
        template=_GRANITE_TEMPLATE,
        features=_GRANITE_FEATURES,
    ),
    "glmasr": SpeechModel(
        config=_glmasr,
        special_tokens=(
            *("<|pad|>", "<|user|>", "<|endoftext|>", "<|assistant|>", "<|system|>"),
            *("<|begin_of_audio|>", "<|end_of_audio|>"),
        ),
        template=_with_parts(_GLM_TEMPLATE, "<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\n"),
        features=_WINDOWS,
    ),
    "qwen2_audio": SpeechModel(
        config=_qwen2_audio,
        special_tokens=(
            *("<|AUDIO|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>"),
            *("<|audio_bos|>", "<|audio_eos|>"),
        ),
        template=_with_parts(_CHATML, "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\n"),
        features=_WINDOWS,
    ),
}


def write_speech_model(name: str, folder: Path, *, deviation: float = 0.2) -> Path:
    """Write a checkpoint into a new folder; return the folder."""
    model = MODELS[name]
    write_checkpoint(folder, model.config(model.tokens), deviation)
    end = model.special_tokens[1]
    write_speech_files(
        folder,
        model.special_tokens,
        end=end,
        end_ids=[model.tokens[end]],
        features=dict(model.features),
        template=model.template,
    )
    return folder


def spell(model: Any, features: Tensor, text: str) -> None:
    """Make the CTC head of a tiny Granite Speech spell a text for these features, (1, T, 2M).

    The encoder's middle layer reads the head's output, so the weights are found iteratively.
    """
    encoder = model.model.encoder
    labels: list[int] = []
    for before, letter in zip(f" {text}", text, strict=False):
        labels += [0] * (before == letter) + [ord(letter)]
    size = features.shape[1]
    wanted = torch.zeros(size, encoder.out.out_features)
    spaced = [*labels, *[0] * (size - len(labels))]
    wanted[range(size), spaced] = 10.0
    with torch.no_grad():
        encoder.out_mid.weight.mul_(0.1)
        for _ in range(_SPELLING_STEPS):
            states = encoder(features).last_hidden_state[0]
            joined = torch.cat([states, torch.ones(size, 1)], dim=1)
            solved = torch.linalg.lstsq(joined, wanted, driver="gelsd").solution
            encoder.out.weight.copy_(solved[:-1].T)
            encoder.out.bias.copy_(solved[-1])
        spelled = encoder.out(encoder(features).last_hidden_state)[0].argmax(-1).tolist()
    assert spelled == spaced, "the head does not spell the text"
